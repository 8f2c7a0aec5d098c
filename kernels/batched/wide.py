"""Long rows on a CPU, where passes over a vocabulary are compiled (``kernels.cpu.draws``), and what torch does elsewhere.

The compiled code leaves a row undecided rather than to answer otherwise than torch; torch decides it then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.cpu.draws import Draws, load_draws
from outrider.kernels.reference import transforms
from outrider.kernels.reference.transforms import Support

# Shorter rows cost torch no more than the calls do, and processes that see no others need no compiler.
MIN_WIDTH = 1 << 12


def wide_draws(logits: Tensor) -> Draws | None:
    """The compiled functions, where they are for rows like these [n, V]."""
    if logits.device.type != "cpu" or logits.shape[-1] < MIN_WIDTH or logits.dtype != torch.float32:
        return None
    return load_draws() if logits.stride(-1) == 1 else None


def argmax(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row [n, V], all valid: [n] int64."""
    draws = wide_draws(logits)
    return logits.max(dim=-1).indices if draws is None else draws.argmax(logits)


def filtered(logits: Tensor, temperature: Tensor, top_k: int) -> Support:
    """``transforms.filtered`` without top-p. temperature: [n, 1] float64."""
    draws = wide_draws(logits)
    if draws is None or not 0 < top_k < logits.shape[-1]:
        return transforms.filtered(logits, temperature=temperature, top_k=top_k)
    columns = draws.top_columns(logits, top_k)
    return Support(columns, logits.gather(1, columns).to(torch.float64) / temperature, is_full=False)


def nuclei(logits: Tensor, temperature: Tensor, top_p: Tensor) -> list[tuple[list[int], Support]]:
    """What top-p leaves of rows, by the width at which they are handled: indices of rows, and their support.

    temperature, top_p: [n, 1] float64. Rows that are in none of them are undecided.
    """
    draws = wide_draws(logits)
    if draws is None:
        return []
    kept, columns, flags = draws.nucleus(logits, temperature.view(-1), top_p.view(-1))
    by_width: dict[int, list[int]] = {}
    for index, count in enumerate(kept.tolist()):
        if count > 0:
            by_width.setdefault(width_of(count, logits.shape[-1]), []).append(index)
    found = []
    for width, members in by_width.items():
        ids, flag = columns[members, :width], flags[members, :width]
        scores = take(logits, members).gather(1, ids).to(torch.float64) / temperature[members]
        found.append((members, Support(ids, scores.masked_fill_(~flag, -torch.inf), is_full=False)))
    return found


def take(values: Tensor, members: Sequence[int]) -> Tensor:
    """Rows of a tensor, members ascending: a view where they are neighbours."""
    return values[members[0] : members[-1] + 1] if are_neighbours(members) else values[list(members)]


def are_neighbours(members: Sequence[int]) -> bool:
    """Whether rows, ascending, have no others between them."""
    return members[-1] - members[0] + 1 == len(members)


def width_of(count: int, size: int) -> int:
    """The width at which a row that keeps ``count`` of ``size`` columns is handled: few widths, few groups."""
    return min(max(16, 1 << (count - 1).bit_length()), size)

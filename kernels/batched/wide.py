"""Long rows on a CPU, where passes over a vocabulary are compiled (``kernels.cpu.draws``).

What is compiled leaves a row undecided rather than to answer otherwise than torch; such rows are not in the answers
here, and torch decides them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.controls import Stage
from outrider.core.sampling import Sampling
from outrider.kernels.batched.rows import Row
from outrider.kernels.cpu.draws import Draws, Filters, load_draws
from outrider.kernels.reference import noise
from outrider.kernels.reference.noise import Purpose

# Shorter rows cost torch no more than the calls do, and processes that see no others need no compiler.
MIN_WIDTH = 1 << 12


def prepare(width: int, device: torch.device) -> None:
    """Build or load what rows of a width take, before anyone waits for one."""
    if device.type == "cpu" and width >= MIN_WIDTH:
        load_draws()


def wide_draws(logits: Tensor) -> Draws | None:
    """The compiled functions, where they are for rows like these, [..., V]."""
    if logits.device.type != "cpu" or logits.shape[-1] < MIN_WIDTH or logits.dtype != torch.float32:
        return None
    return load_draws() if logits.stride(-1) == 1 else None


def is_plain(row: Row) -> bool:
    """Whether temperature, top-k and top-p are all that is done to a row's logits once they are processed."""
    return not row.has(Stage.WARP)


def is_untouched(row: Row) -> bool:
    """Whether they are all that is done to the model's logits."""
    return row.allowed is None and not row.sampling.controls


def filters_of(rows: Sequence[Row], is_raw: Sequence[bool] | None = None) -> Filters:
    """How rows are sampled; where ``is_raw`` or the temperature is 0, as if nothing were set."""
    plain = Sampling()
    settings = [
        plain if raw or row.sampling.temperature == 0.0 else row.sampling
        for row, raw in zip(rows, is_raw or [False] * len(rows), strict=True)
    ]
    return Filters([s.temperature for s in settings], [s.top_k for s in settings], [s.top_p for s in settings])


def keys_of(rows: Sequence[Row], purpose: Purpose, prefix_hashes: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """The keys of rows' random numbers."""
    hashes = [0] * len(rows) if prefix_hashes is None else prefix_hashes
    return [
        noise.noise_key(row.sampling.seed, row.sampling.choice, row.text.length, purpose, prefix_hash)
        for row, prefix_hash in zip(rows, hashes, strict=True)
    ]


def argmax(logits: Sequence[Tensor], members: Sequence[int]) -> dict[int, int]:
    """The first of the largest logits of rows ``members``, by index; of some or all of them. logits: [V] each"""
    draws = wide_draws(logits[members[0]]) if members else None
    if draws is None:
        return {}
    columns = draws.argmax([logits[i] for i in members])
    return {i: column for i, column in zip(members, columns, strict=True) if column >= 0}


def draw(logits: Sequence[Tensor], rows: Sequence[Row], members: Sequence[int], purpose: Purpose) -> dict[int, int]:
    """The tokens that plain rows ``members`` draw, by index; of some or all of them.

    Args:
        logits: n of [V] float32, processed.
        rows: n.
    """
    draws = wide_draws(logits[members[0]]) if members else None
    if draws is None:
        return {}
    chosen = [rows[i] for i in members]
    tokens = draws.draw([logits[i] for i in members], filters_of(chosen), keys_of(chosen, purpose))
    return {i: token for i, token in zip(members, tokens, strict=True) if token >= 0}


def decide(
    logits: Sequence[Tensor],
    rows: Sequence[Row],
    members: Sequence[int],
    tokens: Sequence[int],
    draft_ids: Tensor,
    draft_probs: Tensor,
) -> dict[int, tuple[bool, int]]:
    """``reference.rejection.decide`` for plain rows ``members``, by index: (accepted, own) of some or all of them.

    Args:
        logits, rows: as in ``draw``.
        tokens: the members' proposals; draft_ids [m, w] int64, draft_probs [m, w] float64: their q.
    """
    draws = wide_draws(logits[members[0]]) if members else None
    if draws is None:
        return {}
    chosen = [rows[i] for i in members]
    accepted, own = draws.decide(
        [logits[i] for i in members],
        filters_of(chosen),
        tokens,
        draft_ids,
        draft_probs,
        keys_of(chosen, Purpose.ACCEPT),
        keys_of(chosen, Purpose.RESIDUAL),
    )
    decided = zip(members, accepted, own, strict=True)
    return {i: (flag == 1, token) for i, flag, token in decided if flag >= 0}


def top_rows(
    logits: Sequence[Tensor], rows: Sequence[Row], members: Sequence[int], top_m: int
) -> list[tuple[list[int], Tensor, Tensor]]:
    """What ``transforms.truncate_rows`` leaves of plain rows ``members``, those of one size together: their indices,
    token_ids [g, m] int64 and probs [g, m] float32; of some or all of them.
    """
    draws = wide_draws(logits[members[0]]) if members else None
    if draws is None:
        return []
    chosen = [rows[i] for i in members]
    columns, sizes = draws.top_columns([logits[i] for i in members], filters_of(chosen), top_m)
    found = []
    for size in sorted(set(sizes) - {-1}):
        same = [index for index, other in enumerate(sizes) if other == size]
        ids = columns[same, :size]
        picked = torch.stack([logits[members[index]][ids[row]] for row, index in enumerate(same)])
        heat = torch.tensor([[chosen[index].sampling.temperature] for index in same], dtype=torch.float64)
        probs = torch.softmax(picked.to(torch.float64) / heat, dim=-1).to(torch.float32)
        found.append(([members[index] for index in same], ids, probs))
    return found

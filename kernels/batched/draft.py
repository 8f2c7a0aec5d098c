"""What a draft proposes for many rows, each with settings of its own.

A draft applies the target's own transformations to its own logits, in the same code, so that q is as near to p as the
models are; then ``kernels.reference.draft`` says how it draws, and which row travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.controls import RowText
from outrider.core.sampling import Verifier
from outrider.kernels.batched import wide
from outrider.kernels.batched.data import Ask
from outrider.kernels.batched.rows import Row, processed, supports, take, take_support
from outrider.kernels.reference import noise, sampling, transforms
from outrider.kernels.reference.noise import Purpose


@dataclass(frozen=True)
class Draw:
    """A proposed token, and under rejection what it was drawn from.

    Attributes:
        token_ids: [m] int64, ascending, on the CPU, or None: greedy and coupled proposals need no rows.
        probs: [m] float32, positive, on the CPU, or None.
    """

    token: int
    token_ids: Tensor | None = None
    probs: Tensor | None = None


def draw(logits: Tensor, asks: Sequence[Ask], *, top_m: int) -> list[Draw | None]:
    """One proposal for each row; each depends on its own row alone.

    Args:
        logits: [n, V] float32, the draft's; not changed.
        asks: n.
        top_m: entries of the row that is sampled and sent; used under rejection only.

    Returns:
        None where the row holds no distribution, or the settings leave nothing of it.
    """
    if len(asks) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits, but {len(asks)} asks")
    rows = [Row(ask.sampling, RowText(ask.text, ask.position, ask.sampling.prompt_len), ask.allowed) for ask in asks]
    untouched = [i for i, row in enumerate(rows) if wide.is_untouched(row)]
    draws = _draw_wide(logits, rows, asks, untouched, top_m)
    left = [i for i in range(len(rows)) if i not in draws]
    if left:
        ready = processed(take(logits, left), [rows[i] for i in left], may_change=False)
        usable = [index for index, is_usable in enumerate(ready.usable.tolist()) if is_usable]
        part = _Part(ready.logits, [rows[i] for i in left], [asks[i] for i in left])
        touched = [index for index in usable if not wide.is_untouched(part.rows[index])]
        found = _draw_wide(part.logits, part.rows, part.asks, touched, top_m)
        found |= _draw_each(part, [index for index in usable if index not in found], top_m)
        draws |= {left[index]: drawn for index, drawn in found.items()}
    return [draws.get(i) for i in range(len(rows))]


@dataclass(frozen=True)
class _Part:
    """Some of the rows, processed."""

    logits: Tensor  # [n, V] float32
    rows: Sequence[Row]
    asks: Sequence[Ask]


def _draw_wide(
    logits: Tensor, rows: Sequence[Row], asks: Sequence[Ask], members: Sequence[int], top_m: int
) -> dict[int, Draw]:
    """What rows ``members`` of processed logits [n, V] propose, by index: of some or all of them."""
    if not members or wide.wide_draws(logits) is None:
        return {}
    each = logits.unbind()
    plain = [i for i in members if wide.is_plain(rows[i])]
    greedy, coupled, own = (
        [i for i in plain if rows[i].sampling.verifier is verifier]
        for verifier in (Verifier.GREEDY, Verifier.COUPLED, Verifier.REJECTION)
    )
    tokens = wide.argmax(each, greedy) | wide.draw(each, rows, coupled, Purpose.COUPLED)
    draws = {i: Draw(token) for i, token in tokens.items()}
    for chosen, token_ids, probs in wide.top_rows(each, rows, own, top_m):
        draws |= zip(chosen, _draw_own(token_ids, probs, rows, asks, chosen), strict=True)
    return draws


def _draw_each(part: _Part, members: Sequence[int], top_m: int) -> dict[int, Draw]:
    """What usable rows ``members`` propose, by index."""
    rows = part.rows
    draws: dict[int, Draw] = {}
    greedy = [i for i in members if rows[i].sampling.verifier is Verifier.GREEDY]
    if greedy:
        tokens = take(part.logits, greedy).max(dim=-1).indices.tolist()
        draws |= {i: Draw(token) for i, token in zip(greedy, tokens, strict=True)}
    sampled = [i for i in members if rows[i].sampling.verifier is not Verifier.GREEDY]
    for group in supports(part.logits, rows, sampled):
        for verifier in (Verifier.COUPLED, Verifier.REJECTION):
            chosen = [j for j, i in enumerate(group.members) if rows[i].sampling.verifier is verifier]
            if not chosen:
                continue
            support = take_support(group.support, chosen)
            own = [group.members[j] for j in chosen]
            if verifier is Verifier.COUPLED:
                tokens = sampling.draw(support, row_keys([rows[i] for i in own], Purpose.COUPLED)).tolist()
                draws |= {i: Draw(token) for i, token in zip(own, tokens, strict=True)}
            else:
                token_ids, probs = transforms.truncate_rows(support, top_m)
                draws |= zip(own, _draw_own(token_ids, probs, rows, part.asks, own), strict=True)
    return draws


def row_keys(rows: Sequence[Row], purpose: Purpose, prefix_hashes: Sequence[int] | None = None) -> Tensor:
    """The keys of rows' random numbers: [n, 2] int64."""
    return noise.noise_keys(
        [row.sampling.seed for row in rows],
        [row.sampling.choice for row in rows],
        [row.text.length for row in rows],
        purpose,
        prefix_hashes,
    )


def _draw_own(
    token_ids: Tensor, probs: Tensor, rows: Sequence[Row], asks: Sequence[Ask], members: Sequence[int]
) -> list[Draw]:
    """Draws of the draft's own, with the rows that they come from, as they are sent: token_ids, probs [m, w]."""
    keys = row_keys([rows[i] for i in members], Purpose.DRAFT, [asks[i].prefix_hash for i in members])
    tokens = sampling.gumbel_argmax(token_ids, probs.to(torch.float64).log(), keys).tolist()
    token_ids, probs = token_ids.cpu(), probs.cpu()  # zeros pad rows and do not travel
    rows_of_all = zip(tokens, token_ids, probs, probs > 0, strict=True)
    return [Draw(token, ids[positive], row[positive]) for token, ids, row, positive in rows_of_all]

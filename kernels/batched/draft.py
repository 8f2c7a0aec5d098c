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
from outrider.kernels.batched.data import Ask
from outrider.kernels.batched import wide
from outrider.kernels.batched.rows import Row, processed, row_keys, supports, take_support
from outrider.kernels.batched.whole import draw_whole, is_whole, temperatures_of
from outrider.kernels.batched.wide import take
from outrider.kernels.reference import sampling, transforms
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
    draws: list[Draw | None] = [None] * len(asks)
    if not asks:
        return draws
    rows = [Row(ask.sampling, RowText(ask.text, ask.position, ask.sampling.prompt_len), ask.allowed) for ask in asks]
    ready = processed(logits, rows, may_change=False)
    is_usable = ready.usable.tolist()
    usable = [i for i in range(len(rows)) if is_usable[i]]
    greedy = [i for i in usable if rows[i].sampling.verifier is Verifier.GREEDY]
    if greedy:
        tokens = wide.argmax(take(ready.logits, greedy)).tolist()
        for i, token in zip(greedy, tokens, strict=True):
            draws[i] = Draw(token)
    whole = [i for i in usable if is_whole(rows[i], logits.shape[-1])]
    coupled = [i for i in whole if rows[i].sampling.verifier is Verifier.COUPLED]
    for i, token in draw_whole(ready.logits, rows, coupled, Purpose.COUPLED).items():
        draws[i] = Draw(token)
    own = [i for i in whole if rows[i].sampling.verifier is Verifier.REJECTION]
    if own and wide.wide_draws(logits) is not None:
        # The ranking by logit is that by score, so that what is sent can be cut out first.
        temperature = temperatures_of([rows[i] for i in own])[:, None]
        support = wide.filtered(take(ready.logits, own), temperature, top_m)
        for i, drawn in zip(own, _draw_own(support, rows, asks, own, top_m), strict=True):
            draws[i] = drawn
    sampled = [i for i in usable if draws[i] is None]
    for group in supports(ready.logits, rows, sampled):
        for verifier in (Verifier.COUPLED, Verifier.REJECTION):
            chosen = [j for j, i in enumerate(group.members) if rows[i].sampling.verifier is verifier]
            if not chosen:
                continue
            support = take_support(group.support, chosen)
            members = [group.members[j] for j in chosen]
            if verifier is Verifier.COUPLED:
                tokens = sampling.draw(support, row_keys([rows[i] for i in members], Purpose.COUPLED)).tolist()
                for i, token in zip(members, tokens, strict=True):
                    draws[i] = Draw(token)
            else:
                for i, drawn in zip(members, _draw_own(support, rows, asks, members, top_m), strict=True):
                    draws[i] = drawn
    return draws


def _draw_own(
    support: transforms.Support, rows: Sequence[Row], asks: Sequence[Ask], members: Sequence[int], top_m: int
) -> list[Draw]:
    """Draws of the draft's own, with the rows that they come from."""
    token_ids, probs = transforms.truncate_rows(support, top_m)
    keys = row_keys([rows[i] for i in members], Purpose.DRAFT, [asks[i].prefix_hash for i in members])
    tokens = sampling.gumbel_argmax(token_ids, probs.to(torch.float64).log(), keys).tolist()
    token_ids, probs = token_ids.cpu(), probs.cpu()  # zeros pad rows and do not travel
    rows_of_all = zip(tokens, token_ids, probs, probs > 0, strict=True)
    return [Draw(token, ids[positive], row[positive]) for token, ids, row, positive in rows_of_all]

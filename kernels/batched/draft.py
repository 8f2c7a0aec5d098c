"""What a draft proposes for many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.controls import RowText
from outrider.core.sampling import Verifier
from outrider.kernels.batched.data import Ask
from outrider.kernels.reference.chain import draw_from
from outrider.kernels.reference.distribution import distribution
from outrider.kernels.reference.errors import InvalidLogitsError, NothingAllowedError
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.transforms import truncate


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
    """One proposal for each row of logits [n, V] float32; None where it holds no distribution."""
    return [_draw_one(row, ask, top_m) for row, ask in zip(logits, asks, strict=True)]


def _draw_one(row: Tensor, ask: Ask, top_m: int) -> Draw | None:
    sampling = ask.sampling
    text = RowText(ask.text, ask.position, sampling.prompt_len)
    try:
        log_probs = distribution(row, sampling, text, ask.allowed)
    except (InvalidLogitsError, NothingAllowedError):
        return None
    if sampling.verifier is Verifier.GREEDY:
        return Draw(int(log_probs.argmax()))
    if sampling.verifier is Verifier.COUPLED:
        return Draw(draw_from(log_probs, sampling, ask.position, Purpose.COUPLED))
    token_ids, probs = truncate(log_probs, top_m)
    truncated = torch.full_like(log_probs, -torch.inf)
    truncated[token_ids] = probs.to(torch.float64).log()
    token = draw_from(truncated, sampling, ask.position, Purpose.DRAFT, ask.prefix_hash)
    return Draw(token, token_ids, probs)

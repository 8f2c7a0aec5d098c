"""From one row of logits to the distribution that is sampled, one step after the other: the definition.

1. the grammar's mask: -inf where it forbids the token
2. LOGITS controls, in their order, in float32
3. temperature 0: all mass on the largest logit, the lowest id on a tie; nothing below applies
4. division by the temperature, in float64 from here on
5. top-k, then top-p, over the ranking by logit, the lower id first on a tie
6. WARP controls, in their order
7. normalised

Steps 2 and 4 to 6 are in transformers' order; see docs/sampling.md. ``kernels.batched`` does the same for many rows
and is compared with this.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.controls import CONTROLS, RowText, Stage
from outrider.core.sampling import Sampling
from outrider.kernels.reference.errors import InvalidLogitsError, NothingAllowedError, invalid_logits, nothing_allowed


def distribution(logits_row: Tensor, sampling: Sampling, text: RowText, allowed: Tensor | None = None) -> Tensor:
    """Log-probabilities of the next token: what plain decoding, verification and a draft sample from.

    Args:
        logits_row: [V] float32, the model's.
        text: the tokens before the row.
        allowed: [V] bool, what the grammar allows; None without a grammar.

    Returns:
        [V] float64, normalised; -inf for tokens that are excluded.

    Raises:
        InvalidLogitsError: the model's row has a NaN or +inf, or no finite entry.
        NothingAllowedError: the settings exclude every token.
    """
    row = processed_logits(logits_row, sampling, text, allowed)
    if sampling.temperature == 0.0:
        best = int(row.argmax())  # the first of the largest
        certain = torch.full(row.shape, -math.inf, dtype=torch.float64)
        certain[best] = 0.0
        return certain
    scores = row.to(torch.float64) / sampling.temperature
    ranking = row.argsort(descending=True, stable=True)
    if 0 < sampling.top_k < len(row):
        scores[ranking[sampling.top_k :]] = -math.inf
    if sampling.top_p < 1.0:
        probs = torch.softmax(scores, dim=-1).tolist()
        mass, num_kept = 0.0, 0
        for token in ranking.tolist():
            if mass >= sampling.top_p:
                break
            mass += probs[token]
            num_kept += 1
        scores[ranking[num_kept:]] = -math.inf
    for control, value in controls_of(sampling, Stage.WARP):
        scores = control.reference(scores, value, text)
    return torch.log_softmax(scores, dim=-1)


def processed_logits(logits_row: Tensor, sampling: Sampling, text: RowText, allowed: Tensor | None = None) -> Tensor:
    """The row after the grammar's mask and the LOGITS controls: [V] float32. Raises as ``distribution``."""
    if not math.isfinite(float(logits_row.max())):  # max passes a NaN on
        raise InvalidLogitsError(invalid_logits(text.length))
    row = logits_row
    if allowed is not None:
        row = row.masked_fill(~allowed, -math.inf)
    for control, value in controls_of(sampling, Stage.LOGITS):
        row = control.reference(row, value, text)
    highest = float(row.max())
    if highest == -math.inf:
        raise NothingAllowedError(nothing_allowed(text.length))
    if not math.isfinite(highest):
        raise InvalidLogitsError(invalid_logits(text.length))
    return row


def processed_log_probs(logits_row: Tensor, sampling: Sampling, text: RowText, allowed: Tensor | None = None) -> Tensor:
    """What ``LogprobsMode.PROCESSED`` reports: ``distribution``; at temperature 0 that of the processed logits."""
    if sampling.temperature == 0.0:
        return torch.log_softmax(processed_logits(logits_row, sampling, text, allowed).to(torch.float64), dim=-1)
    return distribution(logits_row, sampling, text, allowed)


def controls_of(sampling: Sampling, stage: Stage) -> list[tuple]:
    """The (control, value) of a request that belong to a stage, in the order in which they apply."""
    values = dict(sampling.controls)
    return [
        (control, values[control.name]) for control in CONTROLS if control.stage is stage and control.name in values
    ]

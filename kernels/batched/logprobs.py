"""Log-probabilities of given tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.logprobs import TokenLogprobs
from outrider.kernels.reference.chain import token_logprobs


def score(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The log-probability of one token for each row.

    Args:
        logits: [n, V] float32, the model's.
        tokens: n.
        num_top: most likely tokens that are reported beside each.
    """
    return [
        token_logprobs(torch.log_softmax(row.to(torch.float64), dim=-1), token, num_top)
        for row, token in zip(logits, tokens, strict=True)
    ]

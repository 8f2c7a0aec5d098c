"""Log-probabilities of given tokens, and of the most likely ones beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.logprobs import TokenLogprobs
from outrider.kernels.reference import transforms
from outrider.kernels.reference.transforms import Support

# Rows that are worked on at once: float64 copies of more would not stay in a processor's cache.
_SLICE = 8


def score(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The log-probability of one token for each row, under the model's own distribution.

    Args:
        logits: [n, V] float32, each row valid.
        tokens: n.
        num_top: most likely tokens that are reported beside each.
    """
    return score_rows(logits, tokens, [num_top] * len(tokens))


def score_rows(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """``score`` with a number of alternatives for each row."""
    everything = torch.arange(logits.shape[-1], device=logits.device)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _SLICE):
        part = slice(start, start + _SLICE)
        scores = logits[part].to(torch.float64)
        support = Support(everything.expand(scores.shape), scores, is_full=True)
        entries += support_logprobs(support, tokens[part], num_top[part])
    return entries


def support_logprobs(support: Support, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The same under what may be drawn: -inf for tokens that are excluded.

    Args:
        support: n rows.
        tokens, num_top: n each.
    """
    log_probs = torch.log_softmax(support.scores, dim=-1)  # [n, s] float64
    asked = torch.tensor(tokens, dtype=torch.int64, device=log_probs.device)[:, None]
    columns, found = support.columns(asked)
    chosen = log_probs.gather(1, columns).masked_fill_(~found, -torch.inf)  # [n, 1]
    ranks = (log_probs > chosen).sum(dim=-1) + 1
    first = transforms.top_columns(log_probs, max(1, *num_top))
    top, order = log_probs.gather(1, first).sort(dim=-1, descending=True, stable=True)  # equal ones stay by token id
    top_ids = support.token_ids.gather(1, first.gather(1, order))
    counts = [
        min(count, wanted) for count, wanted in zip((top > -torch.inf).sum(dim=-1).tolist(), num_top, strict=True)
    ]
    numbers = zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top.tolist(), counts, strict=True)
    return [
        TokenLogprobs(token, value, rank, tuple(ids[:count]), tuple(values[:count]))
        for token, value, rank, ids, values, count in numbers
    ]

"""Log-probabilities of given tokens, and of the most likely ones beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.logprobs import TokenLogprobs
from outrider.kernels.batched.wide import wide_draws
from outrider.kernels.cpu.draws import Draws
from outrider.kernels.reference import transforms
from outrider.kernels.reference.transforms import Support

# Rows that are worked on at once: on a CPU few, so that their float64 copies stay in its cache.
_CPU_SLICE, _SLICE = 2, 64


def score(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The log-probability of one token for each row, under the model's own distribution.

    Args:
        logits: [n, V] float32, each row valid.
        tokens: n.
        num_top: most likely tokens that are reported beside each.
    """
    return score_rows(logits, tokens, [num_top] * len(tokens))


def score_rows(
    logits: Tensor, tokens: Sequence[int], num_top: Sequence[int], temperatures: Sequence[float] | None = None
) -> list[TokenLogprobs]:
    """``score`` with a number of alternatives, and a temperature above 0, for each row."""
    heat = torch.tensor([1.0] * len(tokens) if temperatures is None else temperatures, dtype=torch.float64)
    entries: list[TokenLogprobs] = []
    draws = wide_draws(logits)
    step = _CPU_SLICE if logits.device.type == "cpu" and draws is None else _SLICE
    for start in range(0, len(tokens), step):
        part = slice(start, start + step)
        columns = torch.tensor(tokens[part], dtype=torch.int64, device=logits.device)[:, None]
        if draws is not None:
            entries += _wide_entries(draws, logits[part], heat[part], columns, tokens[part], num_top[part])
        else:
            scores = logits[part] if temperatures is None else logits[part].to(torch.float64) / heat[part, None]
            entries += _entries(scores, None, columns, tokens[part], num_top[part])
    return entries


def support_logprobs(support: Support, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The same under what may be drawn: -inf for tokens that are excluded.

    Args:
        support: n rows.
        tokens, num_top: n each.
    """
    asked = torch.tensor(tokens, dtype=torch.int64, device=support.scores.device)[:, None]
    columns, _ = support.columns(asked)  # what was committed is in its support
    return _entries(support.scores, None if support.is_full else support.token_ids, columns, tokens, num_top)


def _entries(
    scores: Tensor, token_ids: Tensor | None, columns: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Entries for the columns [n, 1] of scores [n, s], which rank as the log-probabilities do."""
    log_probs = torch.log_softmax(scores.to(torch.float64), dim=-1)
    ranks = (scores > scores.gather(1, columns)).sum(dim=-1) + 1
    first = _ranked(scores, transforms.top_columns(scores, max(1, *num_top)))
    top_ids = first if token_ids is None else token_ids.gather(1, first)
    return _reported(tokens, log_probs.gather(1, columns), ranks, top_ids, log_probs.gather(1, first), num_top)


def _wide_entries(
    draws: Draws,
    logits: Tensor,
    temperatures: Tensor,
    columns: Tensor,
    tokens: Sequence[int],
    num_top: Sequence[int],
) -> list[TokenLogprobs]:
    """Entries for long rows, with the sums and rankings of compiled code. temperatures: [n] float64"""
    normalisers, above = draws.normalisers(logits, temperatures, columns[:, 0])
    first = _ranked(logits, draws.top_columns(logits, max(1, *num_top)))

    def log_probs(which: Tensor) -> Tensor:
        return logits.gather(1, which).to(torch.float64) / temperatures[:, None] - normalisers[:, None]

    return _reported(tokens, log_probs(columns), above + 1, first, log_probs(first), num_top)


def _ranked(scores: Tensor, columns: Tensor) -> Tensor:
    """Columns [n, m], ascending, by their scores; equal ones stay by token id."""
    return columns.gather(1, scores.gather(1, columns).sort(dim=-1, descending=True, stable=True).indices)


def _reported(
    tokens: Sequence[int], chosen: Tensor, ranks: Tensor, top_ids: Tensor, top: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """chosen [n, 1], ranks [n], and the most likely tokens with their log-probabilities [n, m], in their order."""
    possible = (top > -torch.inf).sum(dim=-1).tolist()
    counts = [min(count, wanted) for count, wanted in zip(possible, num_top, strict=True)]
    numbers = zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top.tolist(), counts, strict=True)
    return [
        TokenLogprobs(token, value, rank, tuple(ids[:count]), tuple(values[:count]))
        for token, value, rank, ids, values, count in numbers
    ]

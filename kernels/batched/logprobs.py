"""Log-probabilities of given tokens, and of the most likely ones beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.logprobs import TokenLogprobs
from outrider.kernels.batched.wide import wide_draws
from outrider.kernels.cpu.draws import Filters
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


def score_rows(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """``score`` with a number of alternatives for each row."""
    if wide_draws(logits) is not None:
        return wide_logprobs(logits.unbind(), Filters.none(len(tokens)), tokens, num_top)
    entries: list[TokenLogprobs] = []
    step = _CPU_SLICE if logits.device.type == "cpu" else _SLICE
    for start in range(0, len(tokens), step):
        part = slice(start, start + step)
        columns = torch.tensor(tokens[part], dtype=torch.int64, device=logits.device)[:, None]
        entries += _entries(logits[part], None, columns, tokens[part], num_top[part])
    return entries


def wide_logprobs(
    rows: Sequence[Tensor], filters: Filters, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """The same for long rows, [V] each, under what their filters leave, by compiled passes (``batched.wide``)."""
    draws = wide_draws(rows[0]) if rows else None
    if draws is None:
        return []
    normalisers, above, kept = draws.normalisers(rows, filters, tokens)
    if min(kept) < 0:
        raise ValueError("a row holds no distribution")
    columns, _ = draws.top_columns(rows, Filters.none(len(rows)), max(1, *num_top))
    scores = torch.stack([row[ids] for row, ids in zip(rows, columns, strict=True)])  # [n, m]
    ranked = scores.sort(dim=-1, descending=True, stable=True)  # equal ones stay by token id
    top_ids, top = columns.gather(1, ranked.indices).tolist(), ranked.values.tolist()
    entries = []
    for index, token in enumerate(tokens):
        temperature, normaliser = filters.temperatures[index], normalisers[index]
        count = min(kept[index], num_top[index])
        values = [score / temperature - normaliser for score in top[index][:count] if score > -torch.inf]
        own = float(rows[index][token]) / temperature - normaliser
        entries.append(TokenLogprobs(token, own, above[index] + 1, tuple(top_ids[index][: len(values)]), tuple(values)))
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
    first = transforms.top_columns(scores, max(1, *num_top))
    order = scores.gather(1, first).sort(dim=-1, descending=True, stable=True).indices  # equal ones stay by token id
    first = first.gather(1, order)
    top = log_probs.gather(1, first)
    top_ids = first if token_ids is None else token_ids.gather(1, first)
    possible = (top > -torch.inf).sum(dim=-1).tolist()
    counts = [min(count, wanted) for count, wanted in zip(possible, num_top, strict=True)]
    chosen = log_probs.gather(1, columns)[:, 0].tolist()
    numbers = zip(tokens, chosen, ranks.tolist(), top_ids.tolist(), top.tolist(), counts, strict=True)
    return [
        TokenLogprobs(token, value, rank, tuple(ids[:count]), tuple(values[:count]))
        for token, value, rank, ids, values, count in numbers
    ]

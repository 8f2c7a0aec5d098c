"""transformers' logits processors and warpers for a request's settings, in transformers' order.

What transformers lacks is written here in a few plain lines. The borders of the filters are kept apart: a server whose
sums round otherwise may rightly put a token on the other side of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# By how much a server's logits, and its sums of probabilities, may differ from ours.
LOGIT_TOLERANCE = 1e-4
MASS_TOLERANCE = 5e-5


class OutputPenalty:
    """Presence and frequency penalties: taken from the logits of tokens that the output holds."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self._prompt_len, self._presence, self._frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            tokens, counts = ids[self._prompt_len :].unique(return_counts=True)
            scores[row, tokens] -= self._presence + self._frequency * counts.float()
        return scores


class MinNewTokens:
    """transformers' processor, but where it would leave nothing (a finished grammar allows only the end), it waits."""

    def __init__(self, prompt_len: int, min_tokens: int, end_token_ids: Sequence[int]) -> None:
        from transformers import MinNewTokensLengthLogitsProcessor

        self._inner = MinNewTokensLengthLogitsProcessor(prompt_len, min_tokens, list(end_token_ids))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        banned = self._inner(input_ids, scores)
        nothing = torch.isneginf(banned).all(dim=-1, keepdim=True)
        return torch.where(nothing, scores, banned)


@dataclass(frozen=True)
class Borders:
    """Which tokens may be drawn, under all roundings within the tolerances.

    Attributes:
        loose: [T, V] bool: tokens that some rounding allows.
        uncertain_mass: [T] float64: what the tokens that only some roundings allow weigh, were they all allowed.
    """

    loose: Tensor
    uncertain_mass: Tensor


def processed(processors: Sequence[Any], prefix: Tensor, logits: Tensor) -> Tensor:
    """One row through transformers' list: prefix [L] int64, logits [V] float32 -> [V] float32."""
    from transformers import LogitsProcessorList

    scores: Tensor = LogitsProcessorList(processors)(prefix[None], logits[None].clone())
    return scores[0]


def logits_processors(
    settings: dict[str, Any],
    *,
    prompt_len: int,
    end_token_ids: Sequence[int],
    bad_words_ids: Sequence[Sequence[int]],
    allowed: Callable[[Tensor], list[int]] | None,
) -> list[Any]:
    """What changes logits at every temperature, in transformers' order; each takes (input_ids [1, L], scores [1, V]).

    Args:
        settings: what the request names, by the client's names.
        bad_words_ids: ``bad_words`` as tokens.
        allowed: the grammar: allowed tokens after a prefix; None without one.
    """
    import transformers

    given = {name: value for name, value in settings.items() if value is not None}
    processors: list[Any] = []
    if given.get("logit_bias"):
        biases = {(int(token),): float(bias) for token, bias in given["logit_bias"].items()}
        processors.append(transformers.SequenceBiasLogitsProcessor(biases))
    if given.get("repetition_penalty", 1.0) != 1.0:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(float(given["repetition_penalty"])))
    presence, frequency = float(given.get("presence_penalty", 0.0)), float(given.get("frequency_penalty", 0.0))
    if presence or frequency:
        processors.append(OutputPenalty(prompt_len, presence, frequency))
    if bad_words_ids:
        processors.append(transformers.NoBadWordsLogitsProcessor([list(ids) for ids in bad_words_ids]))
    for choose in (_list_of(given.get("allowed_token_ids")), allowed):
        if choose is not None:
            processors.append(transformers.PrefixConstrainedLogitsProcessor(lambda _, ids, c=choose: c(ids), 1))
    if given.get("banned_token_ids"):
        processors.append(transformers.SuppressTokensLogitsProcessor(given["banned_token_ids"]))
    if given.get("min_tokens") and end_token_ids:
        processors.append(MinNewTokens(prompt_len, int(given["min_tokens"]), end_token_ids))
    return processors


def _list_of(token_ids: Sequence[int] | None) -> Callable[[Tensor], list[int]] | None:
    return None if not token_ids else lambda _: list(token_ids)


def warped(settings: dict[str, Any], scores: Tensor) -> tuple[Tensor, Borders]:
    """What applies at temperatures above 0, to all rows at once: scores [T, V] float32 after the processors.

    Returns the scores that transformers' warpers leave, and the borders of their filters.
    """
    import transformers

    temperature = float(settings.get("temperature", 1.0))
    if temperature != 1.0:
        scores = transformers.TemperatureLogitsWarper(temperature)(None, scores)
    before = scores.double()
    loose = tight = ~torch.isneginf(scores)
    tolerance = LOGIT_TOLERANCE / temperature
    filters: list[tuple[Any, Callable[[Tensor, Tensor, Tensor], Tensor]]] = []
    if top_k := int(settings.get("top_k") or 0):
        filters.append((transformers.TopKLogitsWarper(top_k), lambda s, d, _: _top_k(s, top_k, d)))
    if (top_p := float(settings.get("top_p", 1.0))) < 1.0:
        filters.append((transformers.TopPLogitsWarper(top_p), lambda s, d, m: _top_p(s, top_p + m)))
    if min_p := float(settings.get("min_p", 0.0)):
        filters.append((transformers.MinPLogitsWarper(min_p), lambda s, d, _: _min_p(s, min_p, d)))
    if (typical_p := float(settings.get("typical_p", 1.0))) < 1.0:
        filters.append((transformers.TypicalLogitsWarper(typical_p), lambda s, d, m: _typical(s, typical_p + m, d)))
    for warper, border in filters:
        # What earlier filters may have let through or not shifts the masses of the later ones.
        slack = MASS_TOLERANCE + _uncertain_mass(before, loose, tight)[:, None]
        shift = torch.full_like(slack, tolerance)
        loose = loose & border(scores, shift, slack)
        tight = tight & border(scores, -shift, -slack)
        scores = warper(None, scores)
        loose, tight = loose | ~torch.isneginf(scores), tight & ~torch.isneginf(scores)
    return scores, Borders(loose, _uncertain_mass(before, loose, tight))


def _uncertain_mass(scores: Tensor, loose: Tensor, tight: Tensor) -> Tensor:
    """[T] float64: the weight of what is loose but not tight, among all that is loose."""
    return (torch.softmax(scores.masked_fill(~loose, -torch.inf), dim=-1) * (loose & ~tight)).sum(dim=-1)


def _top_k(scores: Tensor, top_k: int, shift: Tensor) -> Tensor:
    """Which tokens lie among the first ``top_k``, were all others lower by ``shift`` [T, 1] (or higher)."""
    if top_k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    top = scores.topk(top_k + 1, dim=-1).values
    last, next_one = top[:, -2:-1], top[:, -1:]
    return torch.where(shift >= 0, scores >= last - shift, scores > next_one - shift)


def _top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens have less than ``top_p`` [T, 1] before them; the likeliest always stays."""
    probs, order = torch.softmax(scores.double(), dim=-1).sort(dim=-1, descending=True, stable=True)
    kept = probs.cumsum(dim=-1) - probs < top_p
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _min_p(scores: Tensor, min_p: float, shift: Tensor) -> Tensor:
    limit = scores.amax(dim=-1, keepdim=True) + math.log(min_p)
    return (scores >= limit - shift) | (scores == scores.amax(dim=-1, keepdim=True))


def _typical(scores: Tensor, mass: Tensor, shift: Tensor) -> Tensor:
    """Which tokens are typical within ``mass`` [T, 1], were their distances to the entropy less by ``shift``."""
    log_probs = torch.log_softmax(scores.double(), dim=-1)
    entropy = -torch.where(torch.isneginf(log_probs), 0.0, log_probs.exp() * log_probs).sum(dim=-1, keepdim=True)
    distance = (-log_probs - entropy).abs()
    ordered, order = distance.sort(dim=-1)
    upto = log_probs.exp().gather(1, order).cumsum(dim=-1)
    last = (upto < mass).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    behind = torch.nn.functional.pad(ordered, (0, 1), value=torch.inf).gather(1, last + 1)
    kept = torch.where(shift >= 0, distance <= ordered.gather(1, last) + shift, distance < behind + shift)
    kept.scatter_(1, order[:, :1], True)
    return kept & ~torch.isneginf(scores)

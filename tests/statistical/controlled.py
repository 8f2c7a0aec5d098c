"""Speculative decoding under sampling controls and grammar-like masks, through ``kernels.batched``.

With controls a token's distribution depends on everything before it, so a *context* is the whole output so far: all of
them are enumerated, and the truth of each is worked out here in numpy, from the definitions. Decoding, judging and the
false-alarm rate are those of ``harness``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched import draft, verify
from outrider.kernels.batched.data import Ask, Chain

from . import models
from .harness import PROMPT_LENGTH, Decoder, Scenario, Texts

VERIFIERS = {"rejection": Verifier.REJECTION, "coupled": Verifier.COUPLED}


@dataclass(frozen=True)
class Controlled(Scenario):
    """A scenario with controls.

    Attributes:
        controls: resolved.
        has_mask: whether a made-up grammar says which tokens may come (``mask``).
    """

    controls: tuple[tuple[str, Any], ...] = ()
    has_mask: bool = False
    vocab_size: int = 5
    num_texts: int = 2000

    @cached_property
    def outputs(self) -> list[tuple[int, ...]]:
        """Every output of up to ``length`` tokens: those of one length beside each other, in order."""
        found: list[tuple[int, ...]] = [()]
        for output in found:
            if len(output) == self.length:
                break
            found += [(*output, token) for token in range(self.vocab_size)]
        return found

    @cached_property
    def truth(self) -> models.Truth:
        tokens = np.arange(self.vocab_size)
        children = np.arange(len(self.outputs))[:, None] * self.vocab_size + 1 + tokens  # by how outputs are listed
        next_context = np.minimum(children, len(self.outputs) - 1)  # nothing follows those of full length
        return models.Truth(self._probs(self.pair[0]), next_context, 0, tokens, tokens, self.length)

    @cached_property
    def acceptance(self) -> np.ndarray:
        p, q = self.truth.probs, self._probs(self.pair[1])
        if self.verifier == "coupled":
            return models.coupled_acceptance(p, q)
        return models.rejection_acceptance(p, models.truncated_probs(q, self.top_m))

    def _probs(self, model: models.Model) -> np.ndarray:
        rows = []
        for output in self.outputs:
            tokens = [*models.PROMPT, *output]
            logits = model.logits[model.context(np.array(tokens[-2]), np.array(tokens[-1]))]
            rows.append(controlled_probs(logits.astype(np.float64), tokens, self))
        return np.stack(rows)

    def sampling(self, seed: int, **changes: Any) -> Sampling:
        settings = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": seed,
            "verifier": VERIFIERS[self.verifier],
            "controls": self.controls,
            "prompt_len": PROMPT_LENGTH,
        }
        return Sampling(**settings | changes)

    def mask(self, output: Sequence[int]) -> np.ndarray:
        """[V] bool: two of three tokens, which ones depending on the whole output."""
        return (np.arange(self.vocab_size) + sum(output)) % 3 != 0


def controlled_probs(scores: np.ndarray, tokens: list[int], scenario: Controlled) -> np.ndarray:
    """The distribution after ``tokens``: [V] logits → [V]."""
    values, output = dict(scenario.controls), tokens[PROMPT_LENGTH:]
    excluded: set[int] = set()
    if scenario.has_mask:
        excluded |= set(np.flatnonzero(~scenario.mask(output)).tolist())
    for token, bias in values.get("logit_bias", ()):
        scores[token] += bias
    for token in set(tokens):
        penalty = values.get("repetition_penalty", 1.0)
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in output:
        scores[token] -= values.get("frequency_penalty", 0.0)
    for token in set(output):
        scores[token] -= values.get("presence_penalty", 0.0)
    for word in values.get("bad_words", ()):
        if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]:
            excluded.add(word[-1])
    excluded |= set(range(len(scores))) - set(values.get("allowed_token_ids", range(len(scores))))
    excluded |= set(values.get("banned_token_ids", ()))
    number, ends = values.get("min_tokens", (0, ()))
    if len(output) < number and set(range(len(scores))) - excluded - set(ends):
        excluded |= set(ends)
    scores[list(excluded)] = -np.inf
    probs = models.filtered_probs(scores[None], scenario.temperature, scenario.top_k, scenario.top_p)[0]
    probs[probs < values.get("min_p", 0.0) * probs.max()] = 0.0
    probs /= probs.sum()
    if "typical_p" in values:
        with np.errstate(divide="ignore"):
            surprise = -np.log(probs)
        entropy = (probs[probs > 0] * surprise[probs > 0]).sum()
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= values["typical_p"]]] = 0.0
        probs /= probs.sum()
    return probs


class ControlledDecoder(Decoder):
    """Decodes through ``kernels.batched``, which takes chains with settings of their own."""

    scenario: Controlled

    # Planted bugs override these.

    def draft_sampling(self, seed: int) -> Sampling:
        return self.scenario.sampling(seed)

    def target_sampling(self, seed: int) -> Sampling:
        return self.scenario.sampling(seed)

    def masks(self, output: list[int], proposal: list[int]) -> np.ndarray:
        """[k + 1, V] bool: row i is what may follow the first i proposed tokens."""
        return np.stack([self.scenario.mask([*output, *proposal[:i]]) for i in range(len(proposal) + 1)])

    def counted_text(self, name: int, length: int) -> list[int]:
        """The tokens before a round, as the target's controls see them."""
        return self.text[name, :length].tolist()

    # The steps of a round.

    def draw(self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, Any]:
        hashes = self.prefix_hashes(going, position)
        asks = []
        for j, name in enumerate(going):
            text = self.draft_cache[name, : position[j]].tolist()
            allowed = self.masks(text[PROMPT_LENGTH:], [])[0] if self.scenario.has_mask else None
            sampling = self.draft_sampling(int(self.seed[name]))
            mask = None if allowed is None else torch.from_numpy(allowed)
            asks.append(Ask(sampling, int(position[j]), hashes[j], text, mask))
        draws = draft.draw(logits, asks, top_m=self.scenario.top_m)
        rows = [(drawn.token_ids, drawn.probs) for drawn in draws if drawn is not None]
        tokens = np.array([drawn.token for drawn in draws if drawn is not None])
        return tokens, rows if self.scenario.verifier == "rejection" else None

    def verify(
        self, going: np.ndarray, logits: torch.Tensor, tokens: np.ndarray, rows: list, **changes: object
    ) -> tuple[np.ndarray, np.ndarray]:
        chains = []
        for j, name in enumerate(going):
            text, proposal = self.counted_text(name, int(self.length[name])), tokens[j].tolist()
            output = self.text[name, PROMPT_LENGTH : self.length[name]].tolist()
            allowed = torch.from_numpy(self.masks(output, proposal)) if self.scenario.has_mask else None
            sampling = self.target_sampling(int(self.seed[name]))
            chains.append(Chain(logits[j], sampling, len(text), proposal, [row[j] for row in rows], text, allowed))
        outcomes = verify.verify(chains)
        assert not any(outcome.error for outcome in outcomes)
        return np.array([o.num_accepted for o in outcomes]), np.array([o.next_token for o in outcomes])

    def record(self, result: Texts, going: np.ndarray, tokens: np.ndarray, num_accepted: np.ndarray) -> None:
        """Proposals behind the end of a text are not judged: they have no context."""
        vocab_size = self.scenario.vocab_size
        context = np.zeros(len(going), dtype=np.int64)
        for position in range(PROMPT_LENGTH, self.text.shape[1]):
            inside = position < self.length[going]
            context[inside] = context[inside] * vocab_size + 1 + self.text[going[inside], position]
        for i in range(self.k):
            judged = (num_accepted >= i) & (self.length[going] + i < PROMPT_LENGTH + self.scenario.length)
            result.judged_contexts.append(context[judged])
            result.judged_accepted.append((num_accepted > i)[judged])
            context = context * vocab_size + 1 + tokens[:, i]


_PENALTIES = (("frequency_penalty", 0.9), ("presence_penalty", -0.6), ("repetition_penalty", 1.7))
_CUTS = (("logit_bias", ((1, 1.2), (3, -0.8))), ("min_p", 0.12), ("typical_p", 0.85))
_BANS = (("bad_words", ((1, 0, 2), (2, 4), (4,))), ("min_tokens", (2, (0,))))
CONTROLLED = (
    Controlled("rejection-penalties", "rejection", 3, controls=_PENALTIES, model_seed=21),
    Controlled("coupled-penalties", "coupled", 3, controls=_PENALTIES, temperature=0.8, model_seed=22),
    Controlled(
        "rejection-repetition", "rejection", 1, controls=(("repetition_penalty", 4.0),), num_texts=4000, model_seed=23
    ),
    Controlled("rejection-cuts", "rejection", 2, controls=_CUTS, top_m=3, model_seed=24),
    Controlled("coupled-cuts", "coupled", 2, controls=_CUTS, temperature=1.3, model_seed=25),
    Controlled("rejection-min-p", "rejection", 2, controls=(("min_p", 0.25),), model_seed=26),
    Controlled("rejection-mask", "rejection", 2, controls=_BANS[1:], has_mask=True, model_seed=27),
    Controlled("coupled-mask", "coupled", 2, controls=_BANS[1:], has_mask=True, model_seed=28),
    Controlled("coupled-bans", "coupled", 3, controls=_BANS, top_p=0.9, model_seed=29),
    Controlled(
        "rejection-everything",
        "rejection",
        3,
        controls=tuple(sorted((*_PENALTIES, *_CUTS[:2], *_BANS[1:], ("banned_token_ids", (3,))))),
        temperature=1.2,
        top_k=4,
        has_mask=True,
        vocab_size=6,
        model_seed=30,
    ),
)
BY_NAME = {scenario.name: scenario for scenario in CONTROLLED}

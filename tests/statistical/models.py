"""Made-up conditional models, and what is true of them, worked out without the product.

Everything here is numpy in float64 and written from the definitions; nothing imports ``outrider``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

PROMPT = (1, 0)  # the two tokens before the text


@dataclass(frozen=True)
class Model:
    """A model whose next-token logits depend on a *context* of the last two tokens.

    Attributes:
        logits: [num_contexts, vocab_size] float32.
        order: 2: the context is the last two tokens; 1: it is the last token modulo ``num_contexts``.
    """

    logits: np.ndarray
    order: int

    @property
    def num_contexts(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    def context(self, older: np.ndarray, newer: np.ndarray) -> np.ndarray:
        return older * self.vocab_size + newer if self.order == 2 else newer % self.num_contexts


def small_pair(vocab_size: int, seed: int, spread: float = 1.3, distance: float = 0.8) -> tuple[Model, Model]:
    """A target and a draft near it; every context has logits of its own."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0.0, spread, (vocab_size**2, vocab_size))
    draft = target + rng.normal(0.0, distance, target.shape)
    return Model(target.astype(np.float32), 2), Model(draft.astype(np.float32), 2)


def full_pair(seed: int, vocab_size: int = 151_936, num_contexts: int = 4) -> tuple[Model, Model]:
    """A pair on a full vocabulary, of the shape of a language model's rows: a few likely tokens, a Zipf tail, and a
    deep tail of 150,000 tokens that weigh about 10^-4 together."""
    rng = np.random.default_rng(seed)
    rank = np.arange(vocab_size)
    by_rank = np.where(rank < 2000, -1.2 * np.log(rank + 1.0), -21.0)
    target = np.stack([by_rank[rng.permutation(vocab_size)] for _ in range(num_contexts)])
    draft = target + rng.normal(0.0, 0.7, target.shape)
    return Model(target.astype(np.float32), 1), Model(draft.astype(np.float32), 1)


def filtered_probs(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """[C, V] → [C, V]: softmax after temperature, top-k, top-p, by sorting whole rows."""
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=1)
    weights = np.exp(ranked - ranked[:, :1])
    if top_k:
        weights[:, top_k:] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    before = np.cumsum(weights, axis=1) - weights
    if top_p < 1.0:
        weights[before >= top_p] = 0.0
        weights /= weights.sum(axis=1, keepdims=True)
    probs = np.empty_like(weights)
    np.put_along_axis(probs, order, weights, axis=1)
    return probs


def truncated_probs(probs: np.ndarray, top_m: int) -> np.ndarray:
    order = np.argsort(-probs, axis=1, kind="stable")[:, top_m:]
    cut = probs.copy()
    np.put_along_axis(cut, order, 0.0, axis=1)
    return cut / cut.sum(axis=1, keepdims=True)


def rejection_acceptance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Chance that a draw from q is accepted: sum_v min(p, q) (2211.17192, theorem 3.5). [C, V] → [C]."""
    return np.minimum(p, q).sum(axis=1)


def coupled_acceptance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Chance that Gumbel-argmax with shared noise agrees: sum_j 1 / sum_i max(p_i / p_j, q_i / q_j) (2408.07978).

    With tokens sorted by p / q, the inner maximum is q_i / q_j up to j and p_i / p_j after it. [C, V] → [C].
    """
    result = np.zeros(len(p))
    for c in range(len(p)):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = p[c] / q[c]
        order = np.argsort(ratio)  # tokens that neither gives (0 / 0) come last and weigh nothing
        ranked_p, ranked_q = p[c, order], q[c, order]
        q_up_to = np.cumsum(ranked_q)
        p_after = np.cumsum(ranked_p[::-1])[::-1] - ranked_p
        both = (ranked_p > 0) & (ranked_q > 0)
        inner = q_up_to[both] / ranked_q[both] + p_after[both] / ranked_p[both]
        result[c] = (1.0 / inner).sum()
    return result


@dataclass(frozen=True)
class Truth:
    """What texts of the target look like.

    Attributes:
        probs: [C, V] the target's distribution in each context.
        next_context: [C, V] the context after a token.
        start: the context after the prompt.
        bins: [V] which bin a token is counted in.
        symbols: [V] a coarser labelling (or the tokens themselves) in which whole texts are counted.
        length: tokens of a text.
    """

    probs: np.ndarray
    next_context: np.ndarray
    start: int
    bins: np.ndarray
    symbols: np.ndarray
    length: int

    @cached_property
    def bin_probs(self) -> np.ndarray:
        """[C, num_bins]."""
        result = np.zeros((len(self.probs), int(self.bins.max()) + 1))
        for c in range(len(self.probs)):
            result[c] = np.bincount(self.bins, self.probs[c], minlength=result.shape[1])
        return result

    @cached_property
    def marginals(self) -> np.ndarray:
        """[length, num_bins]: distribution of each position's bin."""
        moves = self._moves(np.ones_like(self.bins, dtype=bool))
        contexts = np.zeros(len(self.probs))
        contexts[self.start] = 1.0
        rows = []
        for _ in range(self.length):
            rows.append(contexts @ self.bin_probs)
            contexts = contexts @ moves
        return np.array(rows)

    @cached_property
    def text_probs(self) -> np.ndarray:
        """[num_symbols ** length]: probability of each whole text, spelt in symbols; the first symbol counts most."""
        num_symbols = int(self.symbols.max()) + 1
        moves = [self._moves(self.symbols == symbol) for symbol in range(num_symbols)]
        forward = np.zeros((1, len(self.probs)))
        forward[0, self.start] = 1.0
        for _ in range(self.length):
            forward = np.stack([forward @ move for move in moves], axis=1).reshape(-1, len(self.probs))
        return forward.sum(axis=1)

    def _moves(self, tokens: np.ndarray) -> np.ndarray:
        """[C, C]: chance to go from context to context by one of ``tokens`` (bool [V])."""
        moves = np.zeros((len(self.probs), len(self.probs)))
        for c in range(len(self.probs)):
            moves[c] = np.bincount(self.next_context[c, tokens], self.probs[c, tokens], minlength=len(self.probs))
        return moves

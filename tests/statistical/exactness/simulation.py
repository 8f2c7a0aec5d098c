"""Streams of tokens whose distributions are known, and deviations of a known size: no server and no model.

A stream's rows are drawn from a small set of made-up rows, so that everything about a token is looked up in tables and
hundreds of streams take seconds. The tables are made here by sorting whole rows, not by the harness's own arithmetic;
a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outrider.exactness.evidence import Cells, Evidence
from outrider.exactness.rows import NUM_HASH_CELLS, RANKS

ORDERS = ("likelihood", "token id", "shuffle", "draft against target")


@dataclass(frozen=True)
class Model:
    """R rows over V tokens.

    Attributes:
        probs, draft: [R, V] float64: what the oracle says, and a draft's rows near it.
        repeats: [R, V] int64: class of each token, as of tokens that a text holds already.
        before: order -> [R, V] float64: mass of the tokens that the order puts before each.
        shuffle: [V] int64: a random ranking of the tokens.
    """

    probs: np.ndarray
    draft: np.ndarray
    repeats: np.ndarray
    before: dict[str, np.ndarray]
    rank: np.ndarray
    shuffle: np.ndarray
    tail: np.ndarray

    @staticmethod
    def make(vocab_size: int, num_rows: int, seed: int) -> Model:
        """Rows of the shape of a language model's: some nearly certain, some broad, with a long tail."""
        rng = np.random.default_rng(seed)
        steepness = rng.uniform(0.7, 2.2, num_rows)
        probs = np.empty((num_rows, vocab_size))
        for row in range(num_rows):
            logits = -steepness[row] * np.log1p(np.arange(vocab_size)) + rng.normal(0.0, 0.5, vocab_size)
            probs[row, rng.permutation(vocab_size)] = np.exp(logits)
        probs /= probs.sum(axis=1, keepdims=True)
        draft = probs * np.exp(rng.normal(0.0, 0.8, probs.shape))
        draft /= draft.sum(axis=1, keepdims=True)
        shuffle = rng.permutation(vocab_size)
        keys = {
            "likelihood": probs,
            "token id": np.broadcast_to(-np.arange(float(vocab_size)), probs.shape),
            "shuffle": np.zeros_like(probs),
            "draft against target": draft / probs,
        }
        ranking = {name: np.lexsort((np.broadcast_to(shuffle, key.shape), -key)) for name, key in keys.items()}
        before = {}
        for name, order in ranking.items():
            ranked = np.take_along_axis(probs, order, axis=1)
            before[name] = np.empty_like(probs)
            np.put_along_axis(before[name], order, np.cumsum(ranked, axis=1) - ranked, axis=1)
        rank = np.empty(probs.shape, dtype=np.int64)
        np.put_along_axis(rank, ranking["likelihood"], np.broadcast_to(np.arange(vocab_size), probs.shape), axis=1)
        # As in a text: a few of the tokens occurred, and those that occur often are likely to come again.
        occurred = rng.random(probs.shape) < np.minimum(0.9, 20.0 * probs)
        repeats = np.where(occurred, rng.integers(1, 4, probs.shape), 0)
        return Model(probs, draft, repeats, before, rank, shuffle, 1.0 - before["likelihood"])

    def cells(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """partition -> cell of each token [R, V], mass of each cell [R, C]."""
        made = {}
        for name, cell, count in (
            ("rank", np.searchsorted(RANKS, self.rank, side="right") - 1, len(RANKS)),
            ("tokens", np.broadcast_to(self.shuffle % NUM_HASH_CELLS, self.rank.shape), NUM_HASH_CELLS),
            ("repeats", self.repeats, 4),
        ):
            mass = np.stack([np.bincount(c, p, minlength=count) for c, p in zip(cell, self.probs, strict=True)])
            made[name] = (cell, mass)
        return made


class Streams:
    """Draws streams of ``count`` tokens from ``law`` [R, V] and looks up what the oracle, which believes in
    ``model.probs``, makes of them."""

    def __init__(self, model: Model, law: np.ndarray, count: int) -> None:
        self._model = model
        self._count = count
        self._upto = np.cumsum(law, axis=1)
        self._upto /= self._upto[:, -1:]
        self._cells = model.cells()
        logs = np.log(np.maximum(model.probs, 1e-300))
        self._logs = logs
        self._mean = (model.probs * logs).sum(axis=1)
        self._variance = (model.probs * logs**2).sum(axis=1) - self._mean**2

    def draw(self, rng: np.random.Generator) -> Evidence:
        model, count = self._model, self._count
        rows = np.sort(rng.integers(0, len(model.probs), count))
        tokens = np.concatenate(
            [
                np.searchsorted(self._upto[row], rng.random(int(size)), side="right")
                for row, size in enumerate(np.bincount(rows, minlength=len(model.probs)))
            ]
        )
        shuffled = rng.permutation(count)
        rows, tokens = rows[shuffled], tokens[shuffled]
        number = np.arange(count)
        share = rng.random(count) * model.probs[rows, tokens]
        return Evidence(
            text=number // 48,
            prompt=number // 48 % 16,
            index=number % 48,
            token=tokens,
            place=rng.integers(0, 6, count),
            u={name: before[rows, tokens] + share for name, before in model.before.items()},
            cells={name: Cells(cell[rows, tokens], mass[rows]) for name, (cell, mass) in self._cells.items()},
            tail=model.tail[rows, tokens],
            log_likelihood=self._logs[rows, tokens],
            log_mean=self._mean[rows],
            log_variance=self._variance[rows],
        )


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    """Mean over the rows."""
    return float(np.abs(one - other).sum(axis=1).mean() / 2.0)


def moved(probs: np.ndarray, favoured: np.ndarray, size: float) -> np.ndarray:
    """``probs`` with ``size`` of mass moved to the favoured tokens [R, V] bool, from all others in proportion; from
    them where ``size`` is negative. Rows that cannot give so much stay as they are."""
    inside = np.where(favoured, probs, 0.0).sum(axis=1, keepdims=True)
    after = inside + size
    possible = (inside > 0.0) & (inside < 1.0) & (after > 0.0) & (after < 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        law = np.where(favoured, probs * after / inside, probs * (1.0 - after) / (1.0 - inside))
    return np.where(possible, law, probs)


Deviation = Callable[[Model, float], np.ndarray]

DEVIATIONS: dict[str, Deviation] = {
    "from the likeliest token": lambda model, size: moved(model.probs, model.rank == 0, -size),
    "to the likeliest token": lambda model, size: moved(model.probs, model.rank == 0, size),
    "to one middling token": lambda model, size: moved(model.probs, model.rank == 9, size),
    "to the tail": lambda model, size: moved(model.probs, model.rank >= 200, size),
    "to one token of the vocabulary": lambda model, size: moved(
        model.probs, np.broadcast_to(np.arange(model.rank.shape[1]) == 7, model.rank.shape), size
    ),
    "to tokens that the text holds": lambda model, size: moved(model.probs, model.repeats >= 2, size),
    "towards the draft": lambda model, size: (
        model.probs + size / total_variation(model.probs, model.draft) * (model.draft - model.probs)
    ),
}

"""From the oracle's rows of one text to evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.exactness.evidence import Cells, Evidence
from outrider.exactness.processors import Borders

# A row whose border is uncertain by more than this mass is left out; see ``processors.Borders``.
MAX_UNCERTAIN = 1e-3
# A row in which one token has all but this mass leaves no choice: another one is as good as impossible.
NO_CHOICE = 1e-9
# Ranks at which the cells of rank begin: the likeliest token, the second, the next two, ...
RANKS = np.array([0, 1, 2, 4, 8, 16, 64, 512])
NUM_HASH_CELLS = 16


@dataclass(frozen=True)
class Rows:
    """The oracle's view of T neighbouring tokens of one text's output.

    Attributes:
        start: place of the first of them in the output.
        raw: [T, V] float32: the model's logits.
        scores: [T, V] float32: after every control; -inf for tokens that are excluded.
        borders: tokens that rounding may allow or not.
        draft: [T, V] float32: the same scores by the draft's model; None if it was not named.
    """

    start: int
    raw: Tensor
    scores: Tensor
    borders: Borders
    draft: Tensor | None = None


@dataclass(frozen=True)
class Counts:
    """What became of the tokens of one or more texts.

    Attributes:
        judged: tokens in the evidence.
        forced: rows that leave no choice; their tokens can only be right or impossible.
        uncertain: rows left out because a border lies too close.
        on_border: tokens that only rounding can have allowed.
        impossible: tokens that the settings exclude.
        uncertain_mass: sum, over the judged rows, of the mass that rounding may have moved.
    """

    judged: int = 0
    forced: int = 0
    uncertain: int = 0
    on_border: int = 0
    impossible: int = 0
    uncertain_mass: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Hashing:
    """A keyed shuffle of the vocabulary: an order and cells that have nothing to do with any model."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.place = torch.from_numpy(np.random.default_rng([seed, 1]).permutation(vocab_size))  # [V] int64
        self.cell = self.place % NUM_HASH_CELLS


def measure(
    rows: Rows,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    labels: Mapping[str, int],
    place: Sequence[int],
    hashing: Hashing,
    rng: np.random.Generator,
) -> tuple[Evidence, Counts, list[int]]:
    """Evidence from rows of one text; what became of their tokens; places in the output of impossible ones.

    Args:
        output: the whole of it.
        labels: ``text`` and ``prompt`` numbers of the evidence.
        place: of each output token in its round.
        rng: source of the uniform shares; independent of everything that the server draws.
    """
    end = rows.start + len(rows.scores)
    tokens = torch.tensor(list(output[rows.start : end]), dtype=torch.int64)  # [T]
    probs = torch.softmax(rows.scores.double(), dim=-1)  # [T, V]
    chosen = probs.gather(1, tokens[:, None])[:, 0]  # [T]
    impossible = ~rows.borders.loose.gather(1, tokens[:, None])[:, 0]
    uncertain_mass = rows.borders.uncertain_mass
    forced = probs.amax(dim=-1) > 1.0 - NO_CHOICE
    impossible |= forced & (chosen <= NO_CHOICE)
    forced &= ~impossible
    uncertain = ~impossible & ~forced & (uncertain_mass > MAX_UNCERTAIN)
    on_border = ~impossible & ~forced & ~uncertain & (chosen <= 0.0)
    judged = ~(impossible | forced | uncertain | on_border)
    counts = Counts(
        judged=int(judged.sum()),
        forced=int(forced.sum()),
        uncertain=int(uncertain.sum()),
        on_border=int(on_border.sum()),
        impossible=int(impossible.sum()),
        uncertain_mass=float(uncertain_mass[judged].sum()),
    )

    keep = judged.nonzero()[:, 0]
    share = torch.from_numpy(rng.random(len(tokens)))[keep]
    chosen, kept_tokens = chosen[keep], tokens[keep]
    # Columns of tokens that no row can draw say nothing; filters leave few others.
    columns = (probs[keep] > 0.0).any(dim=0).nonzero()[:, 0]  # [C] int64: the tokens that are left
    columns = columns if len(columns) else tokens[:1]
    probs = probs[keep][:, columns]
    at = torch.searchsorted(columns, kept_tokens)  # [n] int64: where the drawn tokens stand among them
    shuffle, hash_cell = hashing.place[columns], hashing.cell[columns]
    orders = _orders(rows, keep, columns)
    likelihood = orders["likelihood"]
    u = {name: (_mass_before(probs, key, shuffle, at) + share * chosen).numpy() for name, key in orders.items()}
    log_probs = probs.clamp(min=1e-300).log()
    mean = (probs * log_probs).sum(dim=-1)
    variance = ((probs * log_probs.square()).sum(dim=-1) - mean.square()).clamp(min=0.0)
    numbers = rows.start + keep.numpy()
    classes = _repeats(prompt, output[:end], columns, numbers.tolist())
    evidence = Evidence(
        text=np.full(len(keep), labels["text"]),
        prompt=np.full(len(keep), labels["prompt"]),
        index=numbers.astype(np.int64),
        token=kept_tokens.numpy(),
        place=np.asarray(place, dtype=np.int64)[numbers],
        u=u,
        cells={
            "rank": _rank_cells(probs, likelihood, shuffle, at),
            "tokens": _cells(probs, hash_cell.expand(probs.shape), at, NUM_HASH_CELLS),
            "repeats": _cells(probs, classes, at, 4),
        },
        tail=torch.where(likelihood <= likelihood.gather(1, at[:, None]), probs, 0.0).sum(dim=-1).numpy(),
        log_likelihood=log_probs.gather(1, at[:, None])[:, 0].numpy(),
        log_mean=mean.numpy(),
        log_variance=variance.numpy(),
    )
    return evidence, counts, (rows.start + impossible.nonzero()[:, 0]).tolist()


def _orders(rows: Rows, keep: Tensor, columns: Tensor) -> dict[str, Tensor]:
    """order -> [n, C] float64 keys, larger ones first; equal ones by the shuffle."""
    scores, raw = rows.scores[keep][:, columns].double(), rows.raw[keep][:, columns].double()
    orders = {
        "likelihood": scores,
        "token id": -columns.double().expand(scores.shape),
        "shuffle": torch.zeros(1, dtype=torch.float64).expand(scores.shape),
        # What the settings raise comes first, what they lower last: where one of them is left out, mass moves along it.
        "effect of the settings": scores - raw,
    }
    if rows.draft is not None:
        # What the draft overrates comes first: where its distribution leaks into the text, mass moves along it.
        draft = rows.draft[keep][:, columns].double()
        orders["draft against target"] = torch.where(torch.isneginf(scores), -torch.inf, draft - scores)
    return orders


def _mass_before(probs: Tensor, key: Tensor, shuffle: Tensor, tokens: Tensor) -> Tensor:
    """[n] float64: the mass of the tokens that the order puts before each row's token."""
    own = key.gather(1, tokens[:, None])
    before = (key > own) | ((key == own) & (shuffle < shuffle[tokens][:, None]))
    return torch.where(before, probs, 0.0).sum(dim=-1)


def _rank_cells(probs: Tensor, key: Tensor, shuffle: Tensor, tokens: Tensor) -> Cells:
    own = key.gather(1, tokens[:, None])
    rank = ((key > own) | ((key == own) & (shuffle < shuffle[tokens][:, None]))).sum(dim=-1)
    top = probs.topk(min(int(RANKS[-1]), probs.shape[-1]), dim=-1).values.cumsum(dim=-1)  # [n, up to 512]
    bounds = [top[:, min(int(bound), top.shape[1]) - 1] for bound in RANKS[1:]]
    upto = torch.stack([*bounds, torch.ones_like(bounds[0])], dim=-1)  # [n, C] mass up to the end of each cell
    mass = torch.diff(upto, dim=-1, prepend=torch.zeros_like(upto[:, :1])).clamp(min=0.0)
    return Cells(np.searchsorted(RANKS, rank.numpy(), side="right") - 1, mass.numpy())


def _cells(probs: Tensor, classes: Tensor, tokens: Tensor, num_cells: int) -> Cells:
    mass = torch.zeros(len(probs), num_cells, dtype=torch.float64).scatter_add_(1, classes, probs)
    return Cells(classes.gather(1, tokens[:, None])[:, 0].numpy(), mass.numpy())


def _repeats(prompt: Sequence[int], output: Sequence[int], columns: Tensor, keep: Sequence[int]) -> Tensor:
    """[n, C] int64: 0 for tokens that the text does not hold before the row, 1 for those of the prompt only, 2 for
    those that the output holds once, 3 for those that it holds more often. columns: the tokens [C]."""
    column = {token: index for index, token in enumerate(columns.tolist())}
    now = torch.zeros(len(columns), dtype=torch.int64)
    for token in prompt:
        if token in column:
            now[column[token]] = 1
    classes = torch.zeros(len(keep), len(columns), dtype=torch.int64)
    wanted = {place: row for row, place in enumerate(keep)}
    for place, token in enumerate(output):
        if place in wanted:
            classes[wanted[place]] = now
        if token in column:
            now[column[token]] = min(3, max(2, int(now[column[token]]) + 1))
    return classes

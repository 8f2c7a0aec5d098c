"""What is known of the judged tokens, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cells:
    """One partition of the rows.

    Attributes:
        cell: [N] int64: the cell of the token that was drawn.
        mass: [N, C] float64: how likely the oracle says each cell was.
    """

    cell: np.ndarray
    mass: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """N judged tokens, text after text, in the order of each text. Rows that leave one token only are not among them.

    Attributes:
        text: [N] int64: which text a token belongs to.
        prompt: [N] int64: which prompt that text continues. Texts of one prompt have different seeds or choices.
        index: [N] int64: place in the output.
        token: [N] int64.
        place: [N] int64: tokens since the beginning of its round, as the client saw the rounds. A token's place is
            settled before the token is.
        u: order -> [N] float64.
        cells: partition -> its cells.
        tail: [N] float64: mass of the tokens that are no likelier than the drawn one; P(tail <= t) <= t.
        log_likelihood, log_mean, log_variance: [N] float64: log p of the token, and its mean and variance in the row.
    """

    text: np.ndarray
    prompt: np.ndarray
    index: np.ndarray
    token: np.ndarray
    place: np.ndarray
    u: Mapping[str, np.ndarray]
    cells: Mapping[str, Cells]
    tail: np.ndarray
    log_likelihood: np.ndarray
    log_mean: np.ndarray
    log_variance: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    def where(self, chosen: np.ndarray) -> Evidence:
        """The tokens for which ``chosen`` [N] bool holds."""
        return Evidence(
            **{name: getattr(self, name)[chosen] for name in _COLUMNS},
            u={order: values[chosen] for order, values in self.u.items()},
            cells={name: Cells(cells.cell[chosen], cells.mass[chosen]) for name, cells in self.cells.items()},
        )


_COLUMNS = ("text", "prompt", "index", "token", "place", "tail", "log_likelihood", "log_mean", "log_variance")


def concatenate(parts: Sequence[Evidence]) -> Evidence:
    """``parts`` one after the other; at least one, all with the same orders and partitions."""
    first = parts[0]
    return Evidence(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS},
        u={order: np.concatenate([part.u[order] for part in parts]) for order in first.u},
        cells={
            name: Cells(
                np.concatenate([part.cells[name].cell for part in parts]),
                np.concatenate([part.cells[name].mass for part in parts]),
            )
            for name in first.cells
        },
    )

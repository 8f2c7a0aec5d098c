"""Choosing tokens from long rows of logits, compiled: what takes the place of torch's passes over a vocabulary.

Each function answers as the torch code that it stands in for, for each row alone. A row is left *undecided* (-1) where
it holds no distribution, or where it comes so near to a tie that the rounding of a sum or a logarithm could turn it: it
is to be given to that code.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from outrider.kernels.cpu.build import build_module


@dataclass(frozen=True)
class Filters:
    """How each of some rows is sampled: temperatures above 0, top_k (0 keeps all), and top_p in (0, 1]."""

    temperatures: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]

    @classmethod
    def none(cls, num_rows: int, temperatures: Sequence[float] | None = None) -> Filters:
        """Everything is kept."""
        return cls(temperatures or [1.0] * num_rows, [0] * num_rows, [1.0] * num_rows)

    @property
    def arguments(self) -> tuple[Sequence[float], Sequence[int], Sequence[float]]:
        return self.temperatures, self.top_k, self.top_p


@dataclass(frozen=True)
class Draws:
    """The compiled functions. ``rows`` are [V] float32 each, contiguous on the CPU, of one length."""

    module: ModuleType
    instruction_set: str  # "avx512" or "avx2"

    def argmax(self, rows: Sequence[Tensor]) -> list[int]:
        """The first of the largest logits of each row."""
        columns: list[int] = self.module.argmax(rows, self.instruction_set)
        return columns

    def draw(
        self, rows: Sequence[Tensor], filters: Filters, keys: Sequence[tuple[int, int]], first_token: int = 0
    ) -> list[int]:
        """The columns that ``reference.sampling.draw`` draws from what ``reference.transforms.filtered`` leaves.

        Args:
            keys: from ``noise.noise_key``, one for each row.
            first_token: what column 0 stands for.
        """
        columns: list[int] = self.module.draw(rows, *filters.arguments, _flat(keys), first_token, self.instruction_set)
        return columns

    def top_columns(self, rows: Sequence[Tensor], filters: Filters, count: int) -> tuple[Tensor, list[int]]:
        """The ``count`` first of each row's ranking that the filters keep: [n, min(count, V)] int64, each row's
        ascending and as far as there are so many; and how many there are.
        """
        columns, sizes = self.module.top_columns(rows, *filters.arguments, count, self.instruction_set)
        return columns, sizes

    def normalisers(
        self, rows: Sequence[Tensor], filters: Filters, tokens: Sequence[int]
    ) -> tuple[list[float], list[int], list[int]]:
        """log(sum(exp(logit / temperature))) over what each row keeps, how many logits are above the token's, and how
        many the row keeps.
        """
        found: tuple[list[float], list[int], list[int]] = self.module.normalisers(
            rows, *filters.arguments, tokens, self.instruction_set
        )
        return found

    def decide(
        self,
        rows: Sequence[Tensor],
        filters: Filters,
        tokens: Sequence[int],
        draft_ids: Tensor,  # [n, m] int64
        draft_probs: Tensor,  # [n, m] float64
        accept_keys: Sequence[tuple[int, int]],
        residual_keys: Sequence[tuple[int, int]],
    ) -> tuple[list[int], list[int]]:
        """``reference.rejection.decide`` on what the filters leave: accepted (1, 0 or -1), and own."""
        accepted, own = self.module.decide(
            rows,
            *filters.arguments,
            tokens,
            draft_ids.contiguous(),
            draft_probs.contiguous(),
            _flat(accept_keys),
            _flat(residual_keys),
            self.instruction_set,
        )
        return accepted, own


def _flat(keys: Sequence[tuple[int, int]]) -> list[int]:
    return [half for key in keys for half in key]


@functools.cache
def load_draws(instruction_set: str | None = None) -> Draws | None:
    """The functions on an instruction set, or on the best one. None where there are none; the log says why."""
    module = build_module()
    known = [name for name in module.instruction_sets() if name != "amx"] if module is not None else []
    if module is None or not known or (instruction_set or known[-1]) not in known:
        return None
    return Draws(module, instruction_set or known[-1])

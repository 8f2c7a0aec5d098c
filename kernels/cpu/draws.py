"""Choosing tokens from long rows of logits, compiled: what takes the place of torch's passes over a vocabulary.

Each function answers as the torch code that it stands in for, for each row alone; a row that is *undecided* (-1: it holds no
distribution, or comes so near to a tie that rounding could turn it) is to be given to that code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from outrider.kernels.cpu.build import build_module


@dataclass(frozen=True)
class Draws:
    """The compiled functions. Logits are [n, V] float32 on the CPU, tokens of a row side by side; tokens count from 0."""

    module: ModuleType
    instruction_set: str  # "avx512" or "avx2"

    def argmax(self, logits: Tensor) -> Tensor:
        """The first of the largest logits of each row: [n] int64."""
        columns: Tensor = self.module.argmax(logits, self.instruction_set)
        return columns

    def draw(self, logits: Tensor, temperatures: Tensor, keys: Tensor, first_token: int = 0) -> Tensor:
        """The columns that rows without filters draw, as ``reference.sampling.draw``: [n] int64.

        Args:
            temperatures: [n] float64.
            keys: [n, 2] int64, from ``noise.noise_keys``.
            first_token: what column 0 stands for.
        """
        columns: Tensor = self.module.draw_full(logits, temperatures, keys, first_token, self.instruction_set)
        return columns

    def draw_narrow(self, token_ids: Tensor, scores: Tensor, keys: Tensor) -> Tensor:
        """``reference.sampling.gumbel_argmax``, for rows that are not long. token_ids [n, s] -> [n] int64"""
        tokens: Tensor = self.module.draw_narrow(token_ids.contiguous(), scores.contiguous(), keys)
        return tokens

    def top_columns(self, logits: Tensor, count: int) -> Tensor:
        """``reference.transforms.top_columns``, for rows without NaNs: [n, min(count, V)] int64."""
        if count >= logits.shape[-1]:
            return torch.arange(logits.shape[-1]).expand(logits.shape)
        columns: Tensor = self.module.top_columns(logits, count, self.instruction_set)
        return columns

    def nucleus(self, logits: Tensor, temperatures: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What top-p keeps.

        Args:
            temperatures, top_p: [n] float64; top_p below 1.

        Returns:
            How many each row keeps, [n] int64; -1 also where those are most of the row. Columns [n, w] int64, each row's
            as far as its width of ``batched.rows`` in ascending order, and whether the row keeps them, [n, w] bool.
        """
        kept, columns, flags = self.module.nucleus(logits, temperatures, top_p, self.instruction_set)
        return kept, columns, flags

    def normalisers(self, logits: Tensor, temperatures: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """log(sum(exp(logits / temperature))) [n] float64, and how many logits are above the tokens' [n] int64.

        Each row holds a distribution.
        """
        normalisers, above = self.module.token_scores(logits, temperatures, tokens, self.instruction_set)
        return normalisers, above

    def decide(
        self,
        logits: Tensor,
        temperatures: Tensor,  # [n] float64
        tokens: Tensor,
        draft_ids: Tensor,
        draft_probs: Tensor,
        accept_keys: Tensor,
        residual_keys: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``reference.rejection.decide`` for rows without filters: accepted [n] int64 (1, 0 or -1), own [n] int64."""
        accepted, own = self.module.decide(
            logits,
            temperatures,
            tokens,
            draft_ids.contiguous(),
            draft_probs.contiguous(),
            accept_keys,
            residual_keys,
            self.instruction_set,
        )
        return accepted, own


@functools.cache
def load_draws(instruction_set: str | None = None) -> Draws | None:
    """The functions on an instruction set, or on the best one. None where there are none; the log says why."""
    module = build_module()
    known = [name for name in module.instruction_sets() if name != "amx"] if module is not None else []
    if module is None or not known or (instruction_set or known[-1]) not in known:
        return None
    return Draws(module, instruction_set or known[-1])

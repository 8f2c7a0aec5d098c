"""The memory that the kernels work in: allocated once for the largest bucket, at addresses that a captured graph may
keep. What a launch reads is copied in before; what it gives are views."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.triton.common import ROW_BUCKETS

CHUNK = 128  # positions of a row that one program attends to
VOCAB_BLOCK = 1024  # tokens of a row that one program looks at


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class LinearBuffers:
    """For products with one weight matrix, or several of its shape and type that follow each other."""

    x: Tensor  # [64, in_features], read
    out: Tensor  # [64, out_features] in the type of x, written
    partial: Tensor  # [splits, 64, out_features] float32

    @staticmethod
    def allocate(
        in_features: int, out_features: int, splits: int, dtype: torch.dtype, device: torch.device | str
    ) -> LinearBuffers:
        rows = ROW_BUCKETS[-1]
        return LinearBuffers(
            torch.zeros(rows, in_features, dtype=dtype, device=device),
            torch.zeros(rows, out_features, dtype=dtype, device=device),
            torch.zeros((splits, rows, out_features) if splits > 1 else (1,), dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class AttentionBuffers:
    """For the attention of layers of one shape, that follow each other."""

    query: Tensor  # [64, heads, head_dim], read
    slots: Tensor  # [max_slots] int64, read: of each sequence's positions, one sequence after the other
    rows: Tensor  # [64, 4] int64, read: see ``attention``
    out: Tensor  # [64, heads, head_dim] in the type of the queries, written
    highest: Tensor  # [64, heads, chunks] float32
    weight: Tensor  # [64, heads, chunks] float32
    partial: Tensor  # [64, heads, chunks, head_dim] float32

    @property
    def num_chunks(self) -> int:
        return self.highest.shape[2]

    @staticmethod
    def allocate(
        heads: int, head_dim: int, max_context: int, max_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> AttentionBuffers:
        """``max_context``: positions of the longest row; ``max_slots``: of all sequences of a step."""
        rows, chunks = ROW_BUCKETS[-1], _cdiv(max_context, CHUNK)
        return AttentionBuffers(
            torch.zeros(rows, heads, head_dim, dtype=dtype, device=device),
            torch.zeros(max_slots, dtype=torch.int64, device=device),
            torch.zeros(rows, 4, dtype=torch.int64, device=device),
            torch.zeros(rows, heads, head_dim, dtype=dtype, device=device),
            torch.zeros(rows, heads, chunks, dtype=torch.float32, device=device),
            torch.zeros(rows, heads, chunks, dtype=torch.float32, device=device),
            torch.zeros(rows, heads, chunks, head_dim, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class VerifyBuffers:
    """For verdicts about up to ``max_rows`` rows and chains. The first group is read, the second written."""

    temperatures: Tensor  # [rows] float64; 1 for scores that are divided already
    keys: Tensor  # [rows, 2] int64: of a row's draw
    accept_keys: Tensor  # [rows, 2] int64: of the uniform that decides about a proposal
    proposed: Tensor  # [rows] int64; -1 without a proposal
    draft_ids: Tensor  # [rows, top_m] int64
    draft_probs: Tensor  # [rows, top_m] float64; 0 pads
    first_rows: Tensor  # [rows] int64: of each chain
    num_rows: Tensor  # [rows] int64: of each chain, its proposals and one

    own: Tensor  # [rows] int64: the target's token; -1 where the proposal stands, or there is no distribution
    accepted: Tensor  # [rows] int32: 1 where the proposal stands
    num_accepted: Tensor  # [rows] int64, of each chain
    next_tokens: Tensor  # [rows] int64, of each chain; -1 where it commits nothing

    best: Tensor  # [rows, blocks] float64: the best sum of a block
    best_columns: Tensor  # [rows, blocks] int64
    spare: Tensor  # [rows, blocks] float64: the best for a draw from p
    spare_columns: Tensor  # [rows, blocks] int64
    highest: Tensor  # [rows, blocks] float64
    weight: Tensor  # [rows, blocks] float64: of exp(score - highest)
    mass: Tensor  # [rows, blocks] float64: of the residual
    norms: Tensor  # [rows, 2] float64: highest and weight of the row

    @staticmethod
    def allocate(max_rows: int, vocab_size: int, top_m: int, device: torch.device | str) -> VerifyBuffers:
        blocks = _cdiv(vocab_size, VOCAB_BLOCK)

        def whole(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        def real(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.float64, device=device)

        return VerifyBuffers(
            temperatures=real(max_rows, fill=1.0),
            keys=whole(max_rows, 2),
            accept_keys=whole(max_rows, 2),
            proposed=whole(max_rows, fill=-1),
            draft_ids=whole(max_rows, top_m),
            draft_probs=real(max_rows, top_m),
            first_rows=whole(max_rows),
            num_rows=whole(max_rows),
            own=whole(max_rows, fill=-1),
            accepted=torch.zeros(max_rows, dtype=torch.int32, device=device),
            num_accepted=whole(max_rows),
            next_tokens=whole(max_rows, fill=-1),
            best=real(max_rows, blocks),
            best_columns=whole(max_rows, blocks),
            spare=real(max_rows, blocks),
            spare_columns=whole(max_rows, blocks),
            highest=real(max_rows, blocks),
            weight=real(max_rows, blocks),
            mass=real(max_rows, blocks),
            norms=real(max_rows, 2),
        )

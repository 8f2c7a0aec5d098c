"""What kernels behind the logits share: scores as they come, the tokens they stand for, and the best of a row."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.buffers import VOCAB_BLOCK, VerifyBuffers


@dataclass(frozen=True)
class Layout:
    """How kernels find their way in scores and buffers.

    Attributes:
        num_rows: rows of scores; size: tokens of each; blocks: into which these are cut.
        token_ids: [num_rows, size] int64 where ``is_sparse``; else nobody reads them.
        stride, id_stride: from one row to the next, of scores and of token ids.
        width: the same in what blocks found.
        block_tile: a power of two that ``blocks`` fit into.
    """

    num_rows: int
    size: int
    blocks: int
    token_ids: Tensor
    is_sparse: bool
    stride: int
    id_stride: int
    width: int
    block_tile: int


def checked_layout(buffers: VerifyBuffers, scores: Tensor, token_ids: Tensor | None) -> Layout:
    """Of scores that the buffers hold. Raises ``ValueError`` where they do not.

    Args:
        scores: [n, s] float64 or float32.
        token_ids: [n, s] int64, or None for the whole vocabulary.
    """
    n, size = scores.shape
    if n > len(buffers.own) or size > buffers.best.shape[1] * VOCAB_BLOCK:
        raise ValueError(f"scores are [{n}, {size}], but the buffers hold {len(buffers.own)} rows")
    if size == 0 or scores.stride(1) != 1:
        raise ValueError("scores must have tokens, those of a row side by side")
    if token_ids is not None and (token_ids.shape != scores.shape or token_ids.stride(1) != 1):
        raise ValueError(f"token ids are {tuple(token_ids.shape)}, and scores [{n}, {size}]")
    blocks = triton.cdiv(size, VOCAB_BLOCK)
    ids, is_sparse = (buffers.own, False) if token_ids is None else (token_ids, True)
    return Layout(
        num_rows=n,
        size=size,
        blocks=blocks,
        token_ids=ids,
        is_sparse=is_sparse,
        stride=scores.stride(0),
        id_stride=ids.stride(0),
        width=buffers.best.shape[1],
        block_tile=triton.next_power_of_2(blocks),
    )


@triton.jit
def scores_of(
    scores: tl.tensor,
    temperatures: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
) -> tl.tensor:
    """A row's scores in float64; +inf for a NaN, so that it is found by the largest."""
    score = tl.load(scores + row.to(tl.int64) * stride + column, mask=inside, other=float("-inf")).to(tl.float64)
    score = score / tl.load(temperatures + row)
    return tl.where(score == score, score, float("inf"))


@triton.jit
def ids_of(
    token_ids: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    is_sparse: tl.constexpr,
) -> tl.tensor:
    """The tokens that columns stand for, int64."""
    if is_sparse:
        return tl.load(token_ids + row.to(tl.int64) * stride + column, mask=inside, other=0)
    return column.to(tl.int64)


@triton.jit
def best_of_blocks(
    values: tl.tensor,
    columns: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    block_tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The best of a row and its column; the first block among equals."""
    part = tl.arange(0, block_tile)
    value = tl.load(values + row * width + part, mask=part < blocks, other=float("-inf"))
    best, place = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    return best, tl.load(columns + row * width + place)

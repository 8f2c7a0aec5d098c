"""Linear layers for few rows, which are limited by reading the weights: each weight is read once for 16 rows.

The inputs of an output are summed in blocks, ascending, within splits whose number and borders the weights' shape
alone decides; splits are added in their order. So a row's result depends on that row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.buffers import LinearBuffers
from outrider.kernels.triton.common import INTERPRETED, ROW_TILE, product, row_bucket

_BLOCK_OUT = 32
_BLOCK_IN = 128
# Programs that keep the memory of a large GPU busy. A constant, so that GPUs of one kind agree whatever their size.
_WANTED_PROGRAMS = 512


@dataclass(frozen=True)
class LinearWeights:
    """A weight matrix on the device.

    Attributes:
        values: [out_features, in_features] bfloat16, float16 or int8, contiguous.
        scales: [groups, out_features] float32, for int8.
        group_size: inputs that share a scale; the last group may have fewer. A multiple of 16 if there are several.
    """

    values: Tensor
    scales: Tensor | None = None
    group_size: int = 0

    def __post_init__(self) -> None:
        is_int8 = self.values.dtype == torch.int8
        if not is_int8 and self.values.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"weights are {self.values.dtype}, but must be bfloat16, float16 or int8")
        if is_int8 != (self.scales is not None):
            raise ValueError("int8 weights have scales, others none")
        if not self.values.is_contiguous() or (self.scales is not None and not self.scales.is_contiguous()):
            raise ValueError("weights and scales must be contiguous")
        if self.scales is not None:
            out_features, in_features = self.values.shape
            groups = triton.cdiv(in_features, self.group_size) if self.group_size > 0 else 0
            if tuple(self.scales.shape) != (groups, out_features) or self.scales.dtype != torch.float32:
                raise ValueError(f"scales must be [{groups}, {out_features}] float32 for groups of {self.group_size}")
            if groups > 1 and self.group_size % 16:
                raise ValueError(f"groups of {self.group_size} inputs, but several must be multiples of 16")

    @property
    def is_grouped(self) -> bool:
        return self.scales is not None and len(self.scales) > 1


@dataclass(frozen=True)
class Plan:
    """How a weight matrix is walked through: a function of its shape alone."""

    block_in: int
    splits: int
    split_size: int  # inputs of a split, a multiple of block_in


def plan(weights: LinearWeights) -> Plan:
    """Blocks and splits for one weight matrix."""
    out_features, in_features = weights.values.shape
    block_in = _BLOCK_IN
    while weights.is_grouped and weights.group_size % block_in:
        block_in //= 2
    blocks = triton.cdiv(in_features, block_in)
    wanted = triton.cdiv(_WANTED_PROGRAMS, triton.cdiv(out_features, _BLOCK_OUT))
    splits = max(1, min(wanted, triton.cdiv(in_features, 2 * _BLOCK_IN)))
    return Plan(block_in, splits, triton.cdiv(blocks, splits) * block_in)


def allocate(weights: LinearWeights, dtype: torch.dtype) -> LinearBuffers:
    """Buffers for products with these weights, of rows of that type: the weights' own, or float32 (int8 takes any)."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or (
        weights.scales is None and dtype not in (torch.float32, weights.values.dtype)
    ):
        raise ValueError(f"rows of {dtype} do not go with weights of {weights.values.dtype}")
    out_features, in_features = weights.values.shape
    return LinearBuffers.allocate(in_features, out_features, plan(weights).splits, dtype, weights.values.device)


def linear(buffers: LinearBuffers, num_rows: int, weights: LinearWeights, bias: Tensor | None = None) -> Tensor:
    """The first ``num_rows`` of ``buffers.x`` times the weights.

    Args:
        buffers: from ``allocate``. Rows of x behind ``num_rows`` may hold anything, and are computed with.
        num_rows: 1 to 64.
        bias: [out_features] float32.

    Returns:
        [num_rows, out_features] in the type of x: a view of ``buffers.out``, which the next call overwrites.
    """
    out_features, in_features = weights.values.shape
    if buffers.x.shape[1] != in_features or buffers.out.shape[1] != out_features:
        raise ValueError(f"buffers for another matrix than [{out_features}, {in_features}]")
    way, bucket = plan(weights), row_bucket(num_rows)
    is_whole = way.splits == 1
    # What is absent is never read; a tensor in its place keeps the arguments' types alike.
    scales = buffers.partial if weights.scales is None else weights.scales
    add = buffers.partial if bias is None else bias
    flags = {
        "scaled": weights.scales is not None and not weights.is_grouped,
        "biased": bias is not None,
    }
    out_blocks = triton.cdiv(out_features, _BLOCK_OUT)
    _split_kernel[(bucket // ROW_TILE, out_blocks, way.splits)](
        buffers.x,
        weights.values,
        scales,
        add,
        buffers.partial,
        buffers.out,
        bucket,
        in_features,
        out_features,
        max(1, weights.group_size),
        way.split_size,
        row_tile=ROW_TILE,
        block_out=_BLOCK_OUT,
        block_in=way.block_in,
        grouped=weights.is_grouped,
        whole=is_whole,
        interpreted=INTERPRETED,
        **flags,
    )
    if not is_whole:
        _sum_kernel[(bucket // ROW_TILE, out_blocks)](
            buffers.partial,
            scales,
            add,
            buffers.out,
            bucket,
            out_features,
            way.splits,
            row_tile=ROW_TILE,
            block_out=_BLOCK_OUT,
            **flags,
        )
    return buffers.out[:num_rows]


@triton.jit
def _split_kernel(
    x: tl.tensor,  # [rows, in_features]
    values: tl.tensor,  # [out_features, in_features]
    scales: tl.tensor,  # [groups, out_features] float32
    bias: tl.tensor,  # [out_features] float32
    partial: tl.tensor,  # [splits, rows, out_features] float32, written unless whole
    out: tl.tensor,  # [rows, out_features], written if whole
    rows: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    group_size: tl.tensor,
    split_size: tl.tensor,
    row_tile: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    grouped: tl.constexpr,
    whole: tl.constexpr,
    interpreted: tl.constexpr,
    scaled: tl.constexpr,
    biased: tl.constexpr,
) -> None:
    """One tile of rows and outputs, over the inputs of one split."""
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    column = tl.program_id(1) * block_out + tl.arange(0, block_out)
    split = tl.program_id(2)
    exists = column < out_features
    weight_rows = values + column.to(tl.int64)[None, :] * in_features
    total = tl.zeros([row_tile, block_out], dtype=tl.float32)
    first = split * split_size
    last = tl.minimum(first + split_size, in_features)
    for start in range(first, last, block_in):
        k = start + tl.arange(0, block_in)
        inside = k < last
        left = tl.load(x + row[:, None] * in_features + k[None, :], mask=inside[None, :], other=0.0)
        right = tl.load(weight_rows + k[:, None], mask=inside[:, None] & exists[None, :], other=0)
        if interpreted:
            part = product(left, right.to(tl.float32), interpreted)
        else:
            part = product(left, right.to(left.dtype), interpreted)  # int8 is exact in bfloat16 and float16
        if grouped:
            scale = tl.load(scales + (start // group_size) * out_features + column, mask=exists, other=0.0)
            part = part * scale[None, :]
        total += part
    if whole:
        total = _finished(total, scales, bias, column, exists, scaled, biased)
        tl.store(out + row.to(tl.int64)[:, None] * out_features + column[None, :], total, mask=exists[None, :])
    else:
        place = (split * rows + row).to(tl.int64)[:, None] * out_features + column[None, :]
        tl.store(partial + place, total, mask=exists[None, :])


@triton.jit
def _sum_kernel(
    partial: tl.tensor,  # [splits, rows, out_features] float32
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    out_features: tl.tensor,
    splits: tl.tensor,
    row_tile: tl.constexpr,
    block_out: tl.constexpr,
    scaled: tl.constexpr,
    biased: tl.constexpr,
) -> None:
    """Adds the splits of one tile, ascending."""
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    column = tl.program_id(1) * block_out + tl.arange(0, block_out)
    exists = column < out_features
    total = tl.zeros([row_tile, block_out], dtype=tl.float32)
    for split in range(0, splits):
        place = (split * rows + row).to(tl.int64)[:, None] * out_features + column[None, :]
        total += tl.load(partial + place, mask=exists[None, :], other=0.0)
    total = _finished(total, scales, bias, column, exists, scaled, biased)
    tl.store(out + row.to(tl.int64)[:, None] * out_features + column[None, :], total, mask=exists[None, :])


@triton.jit
def _finished(
    total: tl.tensor,  # [row_tile, block_out] float32
    scales: tl.tensor,
    bias: tl.tensor,
    column: tl.tensor,
    exists: tl.tensor,
    scaled: tl.constexpr,
    biased: tl.constexpr,
) -> tl.tensor:
    if scaled:
        total = total * tl.load(scales + column, mask=exists, other=0.0)[None, :]
    if biased:
        total = total + tl.load(bias + column, mask=exists, other=0.0)[None, :]
    return total

"""Weights as the kernels keep them: bfloat16, or int8 with a scale for each output or group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127
PART_ROWS = 4096


@dataclass(frozen=True)
class Weights:
    """A weight matrix, rounded."""

    values: Tensor  # [out_features, in_features] bfloat16 or int8
    scales: Tensor | None = None  # [groups, out_features] float32, for int8
    group_size: int = 0  # inputs that share a scale; the last group may have fewer

    def dense(self) -> Tensor:
        """The numbers that they stand for, [out_features, in_features] float32."""
        if self.scales is None:
            return self.values.float()
        scales = self.scales.T.repeat_interleave(self.group_size, dim=1)[:, : self.values.shape[1]]
        return self.values.float() * scales


def round_to_bfloat16(weight: Tensor) -> Weights:
    """weight [out_features, in_features], in any type"""
    return Weights(weight.to(torch.bfloat16))


def quantize_int8(weight: Tensor, group_size: int | None = None) -> Weights:
    """weight [out_features, in_features]: symmetric, each group's largest magnitude becomes 127.

    ``group_size`` None: one scale for each output.
    """
    size = min(group_size or weight.shape[1], weight.shape[1])
    # In parts, since a large vocabulary's head would take gigabytes in float32.
    parts = [_quantize(rows.float(), size) for rows in weight.split(PART_ROWS)]
    values, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Weights(values, scales.T.contiguous(), size)


def _quantize(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """weight [n, in_features] float32 -> int8 of that shape, scales [n, groups]"""
    num_rows, in_features = weight.shape
    groups = -(-in_features // size)
    grouped = torch.nn.functional.pad(weight, (0, groups * size - in_features)).view(num_rows, groups, size)
    scales = grouped.abs().amax(dim=2) / LARGEST
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (grouped / steps[:, :, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return values.view(num_rows, groups * size)[:, :in_features], scales

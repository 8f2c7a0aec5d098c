"""The compiled kernels, on one of the instruction sets that this machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.cpu.build import build_module
from outrider.kernels.cpu.weights import Weights


@dataclass(frozen=True)
class PackedWeights:
    """A weight matrix in the order in which the kernels read it."""

    data: Tensor  # [packed elements] bfloat16 or int8
    scales: Tensor | None  # [groups, out_features] float32, for int8
    group_size: int
    out_features: int
    in_features: int
    # Whether rows that meet it on AMX are rounded there to bfloat16, or to 16 bits where they meet int8; other
    # instruction sets would not be faster for it and leave rows as they are.
    rounds_rows: bool = False


@dataclass(frozen=True)
class Affine:
    """``x @ weights.T + bias``"""

    weights: PackedWeights
    bias: Tensor | None = None  # [out_features] float32


@dataclass(frozen=True)
class NormWeight:
    """``x / rms(x) * weight``"""

    weight: Tensor  # [size] float32
    eps: float


@dataclass(frozen=True)
class HeadsShape:
    """What an attention layer is, apart from its products; heads are those of this rank."""

    heads: int
    scale: float
    # Norms over each head's elements, before its rotation.
    q_norm: Tensor | None = None  # [head_dim] float32
    k_norm: Tensor | None = None  # as q_norm
    eps: float = 0.0


@dataclass(frozen=True)
class Kernels:
    """Row-invariant kernels with float32 inputs, sums and outputs. ``plain`` has the same functions in plain torch."""

    module: ModuleType
    # "amx", "avx512" or "avx2". Products, and attention over bfloat16, alone differ between the first two.
    instruction_set: str

    @staticmethod
    def can_pack(weights: Weights) -> bool:
        """Whether ``pack`` takes weights of this kind and shape."""
        return weights.values.dtype == torch.int8 or weights.values.shape[1] % 2 == 0

    def pack(self, weights: Weights) -> PackedWeights:
        """Weights in the order in which the product reads them; they can be let go then."""
        out_features, in_features = weights.values.shape
        data = self.module.pack(weights.values.contiguous(), weights.group_size, self.instruction_set)
        return PackedWeights(data, weights.scales, weights.group_size, out_features, in_features)

    def linear(self, x: Tensor, weights: PackedWeights, bias: Tensor | None) -> Tensor:
        """x [n, in_features], bias [out_features] -> [n, out_features]"""
        out: Tensor = self.module.linear(x, self._matrix(weights, bias))
        return out

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x, residual [..., size], weight [size] -> [..., size]; ``x`` is first added to a residual, in place."""
        out: Tensor = self.module.rms_norm(x, residual, weight, eps, self.instruction_set)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [n, 2 * size], gates first -> [n, size]"""
        out: Tensor = self.module.silu_mul(gate_up, self.instruction_set)
        return out

    def rope_and_store(
        self,
        qkv: Tensor,  # [n, (heads + 2 * kv_heads) * head_dim]
        heads: int,
        cos: Tensor,  # [n, rotary]
        sin: Tensor,  # as cos
        q_norm: Tensor | None,  # [head_dim]
        k_norm: Tensor | None,  # as q_norm
        eps: float,
        keys: Tensor,  # [slots, kv_heads, head_dim] float32 or bfloat16, written
        values: Tensor,  # as keys
        slot_mapping: Tensor,  # [n] int64
    ) -> Tensor:
        """Queries [n, heads, head_dim], turned to their positions; keys and values go to their slots."""
        native = self.module.Heads(heads, 1.0, q_norm, k_norm, eps, self.instruction_set)
        out: Tensor = self.module.rope_and_store(qkv, native, cos, sin, keys, values, slot_mapping)
        return out

    def attention(
        self,
        query: Tensor,  # [n, heads, head_dim]
        keys: Tensor,  # [slots, kv_heads, head_dim] float32 or bfloat16
        values: Tensor,  # as keys
        slots: Tensor,  # [total] int64, of each sequence's positions, one sequence after the other
        rows: Tensor,  # [n, 4] int64, see ``plain.attention``
        scale: float,
    ) -> Tensor:
        """[n, heads * head_dim]"""
        native = self.module.Heads(query.shape[1], scale, None, None, 0.0, self.instruction_set)
        out: Tensor = self.module.attention(query, native, keys, values, slots, rows)
        return out

    def swiglu_layer(self, norm: NormWeight, gate_up: Affine, down: Affine) -> Any:
        """A norm and an MLP after it, which give the bits of their parts.

        Its ``forward(rows, added)`` takes rows [n, hidden] and gives [n, out_features of down]; with ``added``, the
        rows are added to what comes out.
        """
        matrices = (self._matrix(affine.weights, affine.bias) for affine in (gate_up, down))
        return self.module.SwiGluLayer(self._norm(norm), *matrices)

    def attention_layer(self, norm: NormWeight, qkv: Affine, heads: HeadsShape, output: Affine) -> Any:
        """A norm and an attention layer after it, which give the bits of their parts.

        Its ``forward(rows, cos, sin, keys, values, slot_mapping, slots, row_table, added)`` takes rows [n, hidden] and
        else what ``rope_and_store`` and ``attention`` do; [n, out_features of output], ``added`` as in
        ``swiglu_layer``.
        """
        native = self.module.Heads(
            heads.heads, heads.scale, heads.q_norm, heads.k_norm, heads.eps, self.instruction_set
        )
        first, second = (self._matrix(affine.weights, affine.bias) for affine in (qkv, output))
        return self.module.AttentionLayer(self._norm(norm), first, native, second)

    def stack(self, blocks: Sequence[tuple[Any, Any]], norm: NormWeight) -> Any:
        """Blocks of an attention layer and an MLP each, added to their inputs; and a norm after the last.

        Its ``forward(rows, cos, sin, keys, values, slot_mapping, slots, row_table)`` takes the keys and values of each
        layer, and else what an attention layer does; [n, hidden].
        """
        attention, mlps = zip(*blocks, strict=True)
        return self.module.Stack(list(attention), list(mlps), self._norm(norm))

    def _norm(self, norm: NormWeight) -> Any:
        return self.module.Norm(norm.weight, norm.eps, self.instruction_set)

    def _matrix(self, weights: PackedWeights, bias: Tensor | None) -> Any:
        return self.module.Matrix(
            weights.data,
            weights.out_features,
            weights.in_features,
            weights.scales,
            weights.group_size,
            bias,
            weights.rounds_rows,
            self.instruction_set,
        )


def instruction_sets() -> list[str]:
    """The instruction sets that this machine has and the kernels use, best last; none without a build."""
    module = build_module()
    return list(module.instruction_sets()) if module is not None else []


def load_kernels(instruction_set: str | None = None) -> Kernels | None:
    """The kernels on an instruction set, or on the best one. None where there are none; the log says why."""
    module, known = build_module(), instruction_sets()
    if module is None or (instruction_set or known[-1]) not in known:
        return None
    return Kernels(module, instruction_set or known[-1])

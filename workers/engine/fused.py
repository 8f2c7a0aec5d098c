"""Layers on our CPU kernels that take the place of a model's own: norms, SwiGLU MLPs, attention, and blocks of these.

Their inputs and outputs are float32; rows do not depend on one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.kernels.cpu import Kernels
from outrider.workers.engine.attention import STEP_KEYWORD, AttentionStep


def _step(attention_mask: Tensor | None, keywords: Mapping[str, Any]) -> AttentionStep:
    """The step among what a model hands on. Raises ``ConfigError`` where it hands on something else."""
    step: AttentionStep | None = keywords.get(STEP_KEYWORD)
    if step is None or attention_mask is not None:
        raise ConfigError("model: it hands its attention a mask, or keeps keywords from it")
    return step


class FusedRMSNorm(nn.Module):
    """``x / rms(x) * weight``"""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = weight.float().contiguous()  # [size]
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        return self.kernels.rms_norm(x.contiguous(), None, self.weight, self.eps)


class FusedSwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one product (Shazeer, arXiv 2002.05202)."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]"""
        rows: Tensor = self.gate_up(x.reshape(-1, x.shape[-1]))
        out: Tensor = self.down(self.kernels.silu_mul(rows))
        return out.reshape(*x.shape[:-1], -1)


@dataclass(frozen=True)
class AttentionShape:
    """What an attention layer is, apart from its products; heads are those of this rank."""

    layer: int
    heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    # Norms over each head's elements, before its rotation.
    q_norm: Tensor | None = None  # [head_dim] float32
    k_norm: Tensor | None = None  # as q_norm
    eps: float = 0.0


class FusedAttention(nn.Module):
    """Queries, keys and values as one product, then rotary embedding, the paged cache and attention over it."""

    def __init__(self, shape: AttentionShape, qkv: nn.Module, output: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.kernels = kernels

    def forward(
        self,
        hidden_states: Tensor,  # [1, rows, hidden]
        position_embeddings: tuple[Tensor, Tensor],  # cos, sin, each [1, rows, rotary]
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """([1, rows, hidden], None), as transformers' attention modules return it."""
        step = _step(attention_mask, kwargs)
        return self.attend(hidden_states[0], position_embeddings, step)[None], None

    def attend(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], step: AttentionStep) -> Tensor:
        """hidden [rows, hidden], cos and sin as in ``forward`` -> [rows, hidden]"""
        shape = self.shape
        step.check_window(shape.sliding_window)
        step.layers_seen.add(shape.layer)
        cos, sin = (part.reshape(step.num_rows, -1).float() for part in position_embeddings)
        keys, values = step.keys[shape.layer], step.values[shape.layer]
        query = self.kernels.rope_and_store(
            self.qkv(hidden),
            shape.heads,
            cos,
            sin,
            shape.q_norm,
            shape.k_norm,
            shape.eps,
            keys,
            values,
            step.slot_mapping,
        )
        table = step.row_table
        mixed = self.kernels.attention(query, keys, values, table.slots, table.rows, shape.scale)
        out: Tensor = self.output(mixed)
        return out


class FusedBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, without what a model's own layer does around them."""

    def __init__(
        self, attention_norm: FusedRMSNorm, attention: FusedAttention, mlp_norm: FusedRMSNorm, mlp: FusedSwiGLU
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        hidden_states: Tensor,  # [1, rows, hidden]
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],  # cos, sin, each [1, rows, rotary]
        **kwargs: Any,
    ) -> Tensor:
        """[1, rows, hidden]"""
        step = _step(attention_mask, kwargs)
        rows = hidden_states[0]
        rows = rows + self.attention.attend(self.attention_norm.forward(rows), position_embeddings, step)
        return rows.add_(self.mlp.forward(self.mlp_norm.forward(rows)))[None]

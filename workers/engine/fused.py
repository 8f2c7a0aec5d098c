"""Layers on our CPU kernels that take the place of a model's own: norms, SwiGLU MLPs, attention, and blocks of these.

Their inputs and outputs are float32; rows do not depend on one another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.kernels.cpu import HeadsShape, Kernels, NormWeight
from outrider.workers.engine.attention import STEP_KEYWORD, AttentionStep
from outrider.workers.engine.linear import PackedLinear, RowParallelLinear


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

    @property
    def native(self) -> NormWeight:
        return NormWeight(self.weight, self.eps)

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
    """What an attention layer is, apart from its products."""

    layer: int
    head_dim: int
    native: HeadsShape
    sliding_window: int | None = None

    @property
    def heads(self) -> int:
        return self.native.heads


class FusedAttention(nn.Module):
    """Queries, keys and values as one product, then rotary embedding, the paged cache and attention over it."""

    def __init__(self, shape: AttentionShape, qkv: nn.Module, output: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.kernels = kernels

    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""
        width: int = self.qkv.out_features  # type: ignore[assignment]
        return (width // self.shape.head_dim - self.shape.heads) // 2

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
        shape, native = self.shape, self.shape.native
        step.check_window(shape.sliding_window)
        step.layers_seen.add(shape.layer)
        cos, sin = step.rotation(position_embeddings)
        keys, values = step.keys[shape.layer], step.values[shape.layer]
        query = self.kernels.rope_and_store(
            self.qkv(hidden),
            native.heads,
            cos,
            sin,
            native.q_norm,
            native.k_norm,
            native.eps,
            keys,
            values,
            step.slot_mapping,
        )
        table = step.row_table
        mixed = self.kernels.attention(query, keys, values, table.slots, table.rows, native.scale)
        out: Tensor = self.output(mixed)
        return out


class FusedBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, without what a model's own layer does around them.

    Each of the two is one call of our kernels, which gives the bits of the parts.

    Raises ``ConfigError`` where a product is not on our kernels.
    """

    def __init__(
        self, attention_norm: FusedRMSNorm, attention: FusedAttention, mlp_norm: FusedRMSNorm, mlp: FusedSwiGLU
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.products_changed()

    def products_changed(self) -> None:
        """Take the products as they are now."""
        attention, mlp = self.attention, self.mlp
        products = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
        affine = [product.affine if isinstance(product, PackedLinear) else None for product in products]
        qkv, output, gate_up, down = affine
        if qkv is None or output is None or gate_up is None or down is None:
            raise ConfigError("model: a layer's products are not on our kernels")
        heads = attention.shape.native
        self._attend = attention.kernels.attention_layer(self.attention_norm.native, qkv, heads, output)
        self._swiglu = mlp.kernels.swiglu_layer(self.mlp_norm.native, gate_up, down)

    @property
    def native(self) -> tuple[Any, Any]:
        """Its attention layer and its MLP, as our kernels have them."""
        return self._attend, self._swiglu

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
        shape, table = self.attention.shape, step.row_table
        step.check_window(shape.sliding_window)
        step.layers_seen.add(shape.layer)
        cos, sin = step.rotation(position_embeddings)
        keys, values = step.keys[shape.layer], step.values[shape.layer]
        attend = functools.partial(
            self._attend.forward,
            cos=cos,
            sin=sin,
            keys=keys,
            values=values,
            slot_mapping=step.slot_mapping,
            slots=table.slots,
            row_table=table.rows,
        )
        rows = _add_to(hidden_states[0], attend, self.attention.output)
        return _add_to(rows, self._swiglu.forward, self.mlp.down)[None]


def _add_to(rows: Tensor, layer: Callable[..., Tensor], last: nn.Module) -> Tensor:
    """rows [n, hidden] and what the layer makes of them; ``last`` is its last product."""
    if isinstance(last, RowParallelLinear):
        return last.complete(layer(rows, added=False)).add_(rows)
    return layer(rows, added=True)

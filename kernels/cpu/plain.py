"""What the compiled kernels compute, in plain torch: the definition that they are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.cpu.weights import Weights


def linear(x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
    """x [n, in_features], bias [out_features] -> [n, out_features], in the type of x"""
    out = x @ weights.dense().to(x.dtype).T
    return out if bias is None else out + bias


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x, residual [..., size], weight [size] -> [..., size]; ``x`` is first added to a residual, in place.

    Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv 1910.07467.
    """
    total = x if residual is None else residual.add_(x)
    return total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2 * size], gates first -> [n, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope_and_store(
    qkv: Tensor,  # [n, (heads + 2 * kv_heads) * head_dim]
    heads: int,
    cos: Tensor,  # [n, rotary]
    sin: Tensor,  # as cos
    q_norm: Tensor | None,  # [head_dim]
    k_norm: Tensor | None,  # as q_norm
    eps: float,
    keys: Tensor,  # [slots, kv_heads, head_dim], written
    values: Tensor,  # as keys
    slot_mapping: Tensor,  # [n] int64
) -> Tensor:
    """Queries [n, heads, head_dim], turned to their positions; keys and values go to their slots.

    Su et al.: RoFormer, arXiv 2104.09864; the first half of the turned elements is paired with the second.
    """
    kv_heads, head_dim = keys.shape[1:]
    query, key, value = qkv.view(len(slot_mapping), -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    query = query if q_norm is None else rms_norm(query, None, q_norm, eps)
    key = key if k_norm is None else rms_norm(key, None, k_norm, eps)
    keys[slot_mapping] = _turn(key, cos, sin).to(keys.dtype)
    values[slot_mapping] = value.to(values.dtype)
    return _turn(query, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    other = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cos[:, None] + other * sin[:, None], rest], dim=-1)


def attention(
    query: Tensor,  # [n, heads, head_dim]
    keys: Tensor,  # [slots, kv_heads, head_dim]
    values: Tensor,  # as keys
    slots: Tensor,  # [total] int64, of each sequence's positions, one sequence after the other
    rows: Tensor,  # [n, 4] int64
    scale: float,
) -> Tensor:
    """[n, heads * head_dim]

    A row says where its sequence starts in ``slots``, how many positions there are up to its own, from which position
    on its last number counts, and that number: bit ``i`` says whether the row sees position ``i`` from there. So a row
    of a tree sees all that was there before the step, its ancestors and itself.
    """
    group = query.shape[1] // keys.shape[1]
    out = []
    for own, (first, length, step_start, visible) in zip(query, rows.tolist(), strict=True):
        seen = [t for t in range(length) if t < step_start or visible >> (t - step_start) & 1]
        chosen = slots[first + torch.tensor(seen)]
        key = keys[chosen].to(query.dtype).repeat_interleave(group, dim=1)  # [context, heads, head_dim]
        value = values[chosen].to(query.dtype).repeat_interleave(group, dim=1)
        weights = torch.softmax(torch.einsum("hd,thd->ht", own, key) * scale, dim=-1)
        out.append(torch.einsum("ht,thd->hd", weights, value).reshape(-1))
    return torch.stack(out)

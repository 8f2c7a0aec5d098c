"""Norms, SwiGLU, rotary embedding and attention against their definitions in float64, and their rows' bits."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.cpu import Kernels, plain


@pytest.mark.parametrize("size", [1, 15, 64, 1000, 1536])
def test_rms_norm(kernels: Kernels, size: int) -> None:
    rows, weight, residual = 3 * torch.randn(40, size), torch.randn(size), torch.randn(40, size)
    found = kernels.rms_norm(rows, None, weight, 1e-6)
    expected = plain.rms_norm(rows.double(), None, weight.double(), 1e-6)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    kept, summed = residual.clone(), residual + rows
    torch.testing.assert_close(
        kernels.rms_norm(rows, kept, weight, 1e-6), plain.rms_norm(rows, residual, weight, 1e-6), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(kept, summed)
    for count in (1, 2, 7, 33):
        assert torch.equal(kernels.rms_norm(rows[:count], None, weight, 1e-6), found[:count])


@pytest.mark.parametrize("size", [1, 15, 80, 1003])
def test_silu_mul(kernels: Kernels, size: int) -> None:
    rows = 5 * torch.randn(40, 2 * size)
    rows[0, 0], rows[1, 0] = 200.0, -200.0  # beyond what exp can say in float32
    found = kernels.silu_mul(rows)
    torch.testing.assert_close(found.double(), plain.silu_mul(rows.double()), atol=1e-6, rtol=1e-5)
    for count in (1, 2, 7, 33):
        assert torch.equal(kernels.silu_mul(rows[:count].contiguous()), found[:count])
    rows[2, 0] = float("nan")
    assert bool(kernels.silu_mul(rows)[2, 0].isnan())


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dim", "rotary", "normed"), [(128, 128, False), (64, 64, True), (16, 8, False), (80, 32, True)]
)
def test_rope_and_store(kernels: Kernels, dim: int, rotary: int, normed: bool, cache: torch.dtype) -> None:
    heads, kv_heads, count, slots = 6, 2, 20, torch.randperm(50)[:20]
    qkv, angles = torch.randn(count, (heads + 2 * kv_heads) * dim), torch.randn(count, rotary)
    cos, sin = angles.cos(), angles.sin()
    norms = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    keys, values = torch.zeros(50, kv_heads, dim, dtype=cache), torch.zeros(50, kv_heads, dim, dtype=cache)
    expected_keys, expected_values = keys.clone(), values.clone()
    found = kernels.rope_and_store(qkv, heads, cos, sin, *norms, 1e-6, keys, values, slots)
    expected = plain.rope_and_store(qkv, heads, cos, sin, *norms, 1e-6, expected_keys, expected_values, slots)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    tolerance = 1e-5 if cache == torch.float32 else 1e-2
    torch.testing.assert_close(keys, expected_keys, atol=tolerance, rtol=tolerance)
    assert torch.equal(values, expected_values)
    for row in range(count):
        one_keys, one_values = torch.zeros_like(keys), torch.zeros_like(values)
        part = slice(row, row + 1)
        one = kernels.rope_and_store(
            qkv[part], heads, cos[part], sin[part], *norms, 1e-6, one_keys, one_values, slots[part]
        )
        assert torch.equal(one[0], found[row])
        assert torch.equal(one_keys[slots[row]], keys[slots[row]])


def tree_bits(parents: list[int]) -> list[int]:
    """Which nodes each node of a tree sees: its ancestors and itself. A parent of -1 is the committed text."""
    bits: list[int] = []
    for index, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << index)
    return bits


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 128), (14, 2, 64), (4, 4, 16), (8, 1, 48), (7, 1, 80)])
def test_attention_of_chains_and_trees(
    kernels: Kernels, heads: int, kv_heads: int, dim: int, cache: torch.dtype
) -> None:
    num_slots = 700
    keys, values = torch.randn(num_slots, kv_heads, dim).to(cache), torch.randn(num_slots, kv_heads, dim).to(cache)
    free = torch.randperm(num_slots)
    chain, tree = free[:333], free[333 : 333 + 150]
    unused = free[483:]
    keys[unused], values[unused] = float("nan"), float("inf")
    parents = [-1, 0, 0, 1, 1, 2, 5, -1, 7, 3]
    start = len(tree) - len(parents)
    rows = [[0, length, length, 0] for length in (1, 15, 16, 17, 100, 333)]
    rows += [[len(chain), start + index + 1, start, bits] for index, bits in enumerate(tree_bits(parents))]
    table, slots = torch.tensor(rows), torch.cat([chain, tree])
    query = torch.randn(len(rows), heads, dim)
    found = kernels.attention(query, keys, values, slots, table, dim**-0.5)
    expected = plain.attention(query.double(), keys, values, slots, table, dim**-0.5)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    for row in range(len(rows)):
        own = slice(row, row + 1)
        alone = kernels.attention(query[own], keys, values, slots, table[own], dim**-0.5)
        assert torch.equal(alone[0], found[row])


def test_a_tree_of_64_rows(kernels: Kernels) -> None:
    keys, values, query = torch.randn(80, 1, 16), torch.randn(80, 1, 16), torch.randn(64, 2, 16)
    parents = [-1, *(torch.randint(0, index, ()).item() for index in range(1, 64))]
    bits = [value - (value >> 63 << 64) for value in tree_bits([int(parent) for parent in parents])]  # as signed
    rows = torch.tensor([[0, 16 + index + 1, 16, value] for index, value in enumerate(bits)])
    found = kernels.attention(query, keys, values, torch.arange(80), rows, 0.25)
    # Against a dense mask over all positions at once.
    allowed = torch.zeros(64, 80, dtype=torch.bool)
    allowed[:, :16] = True
    for index, value in enumerate(bits):
        for node in range(64):
            allowed[index, 16 + node] = bool(value >> node & 1)
    dense = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.transpose(0, 1).expand(2, -1, -1),
        values.transpose(0, 1).expand(2, -1, -1),
        attn_mask=allowed,
        scale=0.25,
    )
    torch.testing.assert_close(found, dense.transpose(0, 1).reshape(64, -1), atol=1e-5, rtol=1e-5)
    assert torch.equal(kernels.attention(query[63:], keys, values, torch.arange(80), rows[63:], 0.25)[0], found[63])

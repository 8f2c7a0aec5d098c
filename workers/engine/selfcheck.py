"""Measures, when an engine starts, whether a row's result depends on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from outrider.workers.engine.activations import is_activation
from outrider.workers.engine.fused import FusedAttention, FusedRMSNorm, FusedSwiGLU
from outrider.workers.engine.linear import PackedLinear

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 48, 64, 65, 100, 128, 192, 256)
NUM_COMPARED = 12
MAX_ACTIVATION_ROWS = 65
ATTENTION_CONTEXTS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 257)
# Products that take longer than some tenths of a second are left out: it is the large head that they would test.
MAX_MULTIPLICATIONS = 4_000_000_000


def row_counts(max_rows: int) -> list[int]:
    """Numbers of rows to try: small ones, powers of two and their neighbours, and the largest."""
    return sorted({count for count in (*ROW_COUNTS, max_rows) if count <= max_rows})


def linear_is_row_invariant(
    layer: PackedLinear, counts: Iterable[int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a layer gives the first rows the same bits at every count as alone; bias and rank sums left out."""
    affordable = MAX_MULTIPLICATIONS // (layer.in_features * layer.out_features)
    counts = [count for count in counts if count <= max(affordable, NUM_COMPARED)]
    generator = torch.Generator().manual_seed(layer.in_features)
    rows = torch.randn(max(counts), layer.in_features, generator=generator).to(device=device, dtype=dtype)
    alone = [layer.multiply(rows[index : index + 1], None) for index in range(min(NUM_COMPARED, len(rows)))]
    reference = torch.cat(alone)
    for count in counts:
        out: Tensor = layer.multiply(rows[:count], None)
        if not torch.equal(out[:NUM_COMPARED], reference[:count]):
            return False
    return True


def activations_are_row_invariant(model: nn.Module, counts: Iterable[int], dtype: torch.dtype) -> bool:
    """Whether each kind of activation gives a row the same bits at every count, for every width in the model.

    The last rows are the ones that fall behind the last whole vector, so each count compares all of its rows.
    """
    kinds = {type(module): module for module in model.modules() if is_activation(module)}
    if not kinds:
        return True
    widths = {layer.out_features for layer in model.modules() if isinstance(layer, PackedLinear)}
    few = [count for count in counts if count <= MAX_ACTIVATION_ROWS]
    for width in sorted(widths):
        generator = torch.Generator().manual_seed(width)
        rows = torch.randn(max(few) + 1, width, generator=generator).to(dtype)
        for activation in kinds.values():
            alone = torch.cat([activation(row[None]) for row in rows])
            if not all(torch.equal(activation(rows[:count].contiguous()), alone[:count]) for count in few):
                return False
    return True


def linears_are_row_invariant(
    model: Iterable[nn.Module], max_rows: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether that holds for one layer of each shape."""
    by_shape = {
        (layer.out_features, layer.in_features): layer
        for part in model
        for layer in part.modules()
        if isinstance(layer, PackedLinear)
    }
    counts = row_counts(max_rows)
    return all(linear_is_row_invariant(layer, counts, dtype, device) for layer in by_shape.values())


def fused_layers_are_row_invariant(model: nn.Module, counts: Iterable[int], cache_dtype: torch.dtype) -> bool:
    """Whether that holds for one norm, MLP and attention of each size; products are looked at elsewhere."""
    few = [count for count in counts if count <= MAX_ACTIVATION_ROWS]
    checks: dict[tuple[object, ...], Callable[[], bool]] = {}
    for layer in model.modules():
        if isinstance(layer, FusedRMSNorm):
            size = len(layer.weight)
            checks[FusedRMSNorm, size] = lambda layer=layer, size=size: _same_alone(layer, size, few)  # type: ignore[misc]
        elif isinstance(layer, FusedSwiGLU) and isinstance(layer.gate_up, PackedLinear):
            size, silu_mul = layer.gate_up.out_features, layer.kernels.silu_mul
            checks[FusedSwiGLU, size] = lambda function=silu_mul, size=size: _same_alone(function, size, few)  # type: ignore[misc]
        elif isinstance(layer, FusedAttention) and isinstance(layer.qkv, PackedLinear):
            key = (FusedAttention, layer.shape.heads, layer.shape.head_dim, layer.qkv.out_features)
            checks[key] = lambda layer=layer: attention_is_row_invariant(layer, cache_dtype)  # type: ignore[misc]
    return all(check() for check in checks.values())


def _same_alone(function: Callable[[Tensor], Tensor], size: int, counts: Sequence[int]) -> bool:
    rows = torch.randn(max(counts), size, generator=torch.Generator().manual_seed(size))
    alone = torch.cat([function(row[None]) for row in rows])
    return all(torch.equal(function(rows[:count].contiguous()), alone[:count]) for count in counts)


def attention_is_row_invariant(layer: FusedAttention, cache_dtype: torch.dtype) -> bool:
    """Whether rows with contexts of several lengths give the same together as each alone."""
    shape = layer.shape
    kv_heads = layer.num_kv_heads
    context = max(ATTENTION_CONTEXTS)
    generator = torch.Generator().manual_seed(context)
    keys, values = (
        torch.randn(context, kv_heads, shape.head_dim, generator=generator).to(cache_dtype) for _ in range(2)
    )
    slots = torch.randperm(context, generator=generator)
    rows = torch.tensor([(0, length, length, 0) for length in ATTENTION_CONTEXTS])
    query = torch.randn(len(rows), shape.heads, shape.head_dim, generator=generator)
    together = layer.kernels.attention(query, keys, values, slots, rows, shape.native.scale)
    alone = [
        layer.kernels.attention(query[i : i + 1], keys, values, slots, rows[i : i + 1], shape.native.scale)
        for i in range(len(rows))
    ]
    return torch.equal(together, torch.cat(alone))


def layers_are_row_invariant(
    parts: Sequence[nn.Module], max_rows: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> bool:
    """All of the above, for a model's decoder and its head; ``cache_dtype``: that of keys and values."""
    counts = row_counts(max_rows)
    return linears_are_row_invariant(parts, max_rows, dtype, device) and all(
        activations_are_row_invariant(part, counts, dtype) and fused_layers_are_row_invariant(part, counts, cache_dtype)
        for part in parts
    )

"""Measures, when an engine starts, whether a row's result depends on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from outrider.workers.engine.activations import is_activation
from outrider.workers.engine.linear import PackedLinear

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 48, 64, 65, 100, 128, 192, 256)
NUM_COMPARED = 12
MAX_ACTIVATION_ROWS = 65
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

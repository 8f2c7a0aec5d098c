"""Probes: a layer and what would replace it compute the same made-up rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.workers.engine.attention import AttentionStep, SequenceSlots, padded_context
from outrider.workers.engine.linear import RowParallelLinear
from outrider.workers.engine.parallel import Parallel

logger = logging.getLogger(__name__)

# Largest difference, in parts of the largest element: some roundings of float32.
TOLERANCE = 2e-5
PROBE_ROWS = 3
PROBE_START = 5  # positions that the attention's probe finds in the cache


def generator() -> torch.Generator:
    """The same numbers each time."""
    return torch.Generator().manual_seed(0)


def probe_step(last_layer: int, kv_heads: int, head_dim: int) -> AttentionStep:
    """A sequence of PROBE_START positions in the cache and PROBE_ROWS rows. All layers share keys and values."""
    context = padded_context(PROBE_START + PROBE_ROWS)
    numbers = generator()
    keys, values = (torch.randn(context, kv_heads, head_dim, generator=numbers) for _ in range(2))
    slots = torch.randperm(context, generator=numbers)
    sequence = SequenceSlots(0, PROBE_ROWS, PROBE_START, slots)
    mapping = slots[PROBE_START : PROBE_START + PROBE_ROWS].contiguous()
    return AttentionStep([keys] * (last_layer + 1), [values] * (last_layer + 1), mapping, [sequence], max_context=1)


def agree(original: Callable[[], Tensor], replacement: Callable[[], Tensor]) -> bool:
    """Whether the two compute the same up to rounding; one that cannot do with a probe does not."""
    try:
        with torch.inference_mode():
            expected, found = original(), replacement()
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ConfigError) as error:
        logger.debug("a probe failed: %s", error)
        return False
    if expected.shape != found.shape:
        return False
    largest = float(expected.abs().max())
    return torch.allclose(found.float(), expected.float(), rtol=TOLERANCE, atol=TOLERANCE * largest)


@contextlib.contextmanager
def without_ranks(products: Sequence[nn.Module]) -> Iterator[None]:
    """Ranks must not have to meet in a probe, where one of them may have no kernels."""
    split = [product for product in products if isinstance(product, RowParallelLinear)]
    before = [product.parallel for product in split]
    for product in split:
        product.parallel = Parallel.single()
    try:
        yield
    finally:
        for product, parallel in zip(split, before, strict=True):
            product.parallel = parallel

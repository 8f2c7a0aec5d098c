"""Kernels for GPUs, in Triton: small-row linear layers, paged attention, and what follows the logits of a step.

- ``linear``: 1 to 64 rows against bfloat16, float16 or int8 weights.
- ``attention``: packed rows over paged keys and values, with a tree's mask.
- ``verify``: greedy and keyed draws, and the walk along each chain; ``rejection``: accept and residual.
- ``buffers``: the memory that they work in, allocated once.

Row-invariant: tiles, splits and the order of every sum are chosen by shapes of the model and by a row's own context,
never by the rows beside it. Launches read no number back and allocate nothing, so that they can be captured in CUDA
graphs; row counts are rounded up to a few buckets.

Importing this package needs no Triton; its modules do, and ``missing`` says why they cannot be imported.
"""

from __future__ import annotations

import importlib.util


def missing() -> str | None:
    """Why the kernels cannot be imported here; None if they can. Says nothing about a GPU, and imports nothing."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


__all__ = ["missing"]

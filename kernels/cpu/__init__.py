"""Kernels for CPUs: bfloat16 and int8 linear layers, norms, rotary embedding, SwiGLU, paged attention, and draws.

Row-invariant: what a row gives does not depend, by bits, on the rows beside it.
"""

from outrider.kernels.cpu.native import (
    Affine,
    HeadsShape,
    Kernels,
    NormWeight,
    PackedWeights,
    instruction_sets,
    load_kernels,
)
from outrider.kernels.cpu.weights import Weights, quantize_int8, round_to_bfloat16

__all__ = [
    "Affine",
    "HeadsShape",
    "Kernels",
    "NormWeight",
    "PackedWeights",
    "Weights",
    "instruction_sets",
    "load_kernels",
    "quantize_int8",
    "round_to_bfloat16",
]

"""The project's keyed random numbers on the device: the bits of ``kernels.reference.noise``.

Keys come from the host (they are a cryptographic hash of what is drawn, a few bytes a row); what is done for each token
of a vocabulary is done here.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_B = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mixed(bits: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser on uint64."""
    bits = (bits ^ (bits >> 30)) * _MULTIPLIER_A
    bits = (bits ^ (bits >> 27)) * _MULTIPLIER_B
    return bits ^ (bits >> 31)


@triton.jit
def uniforms(keys: tl.tensor, row: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Uniforms in (0, 1), float64, for the key of one row (keys [rows, 2] int64) and tokens of any shape, int64."""
    first = tl.load(keys + row * 2).to(tl.uint64, bitcast=True)
    second = tl.load(keys + row * 2 + 1).to(tl.uint64, bitcast=True)
    bits = mixed(token_ids.to(tl.uint64, bitcast=True) * _GOLDEN + first)
    bits = mixed(bits + second)
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def gumbel(keys: tl.tensor, row: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise, float64."""
    return -tl.log(-tl.log(uniforms(keys, row, token_ids)))

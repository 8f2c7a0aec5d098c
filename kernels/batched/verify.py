"""Verification of many chains."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.kernels.batched.data import Chain, Outcome
from outrider.kernels.reference.chain import verify_one


def verify(chains: Sequence[Chain]) -> list[Outcome]:
    """One outcome for each chain; each depends on its own chain alone."""
    return [verify_one(chain) for chain in chains]

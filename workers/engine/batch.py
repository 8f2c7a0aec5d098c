"""The rows of one forward pass, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceRows:
    """New tokens of one sequence.

    Attributes:
        tokens: token ids to run, at positions ``start``, ``start + 1``, ...; at least one.
        start: number of positions whose keys and values are valid in the cache.
        block_table: block ids; position ``t`` lies in block ``block_table[t // block_size]`` at slot ``t % block_size``.
        logits_rows: indices into ``tokens`` of the rows whose hidden states are wanted.
    """

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]
    logits_rows: Sequence[int] = ()

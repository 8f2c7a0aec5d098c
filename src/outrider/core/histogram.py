"""Counts of values by size, for what is measured once a step or a message and read now and then."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# Upper bounds in seconds: of what a client waits for, and of what a step consists of.
REQUEST_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
STEP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Upper bounds in tokens.
TOKENS = tuple(float(4**power) for power in range(10))


class Histogram:
    """How many values lie below each of some bounds, and their sum. Memory and time for a value never grow.

    One thread observes; others may read: what they see may lack the value that is being counted.
    """

    __slots__ = ("_counts", "_sum", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` are upper ones, inclusive, in ascending order; one without end comes by itself."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, ``times`` times over. One that is no number, or negative, counts as 0."""
        value = value if value > 0.0 else 0.0
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    @property
    def sum(self) -> float:
        return self._sum

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound with the number of values up to it; the last bound is infinity."""
        return list(zip((*self.bounds, math.inf), accumulate(list(self._counts)), strict=True))

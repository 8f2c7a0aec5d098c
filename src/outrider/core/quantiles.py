"""Quantiles of values in ascending order, in the two ways that are wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """With linear interpolation between neighbours: type 7 of Hyndman and Fan (1996), numpy's default.

    For estimates. Raises ``ValueError`` for no values, and for a fraction outside 0 to 1.
    """
    _check(ordered, fraction)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def nearest_rank(ordered: Sequence[float], fraction: float) -> float:
    """The smallest value that ``fraction`` of all do not exceed: type 1 of the same.

    For what is to be a value that was seen. Raises ``ValueError`` as ``quantile``.
    """
    _check(ordered, fraction)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def _check(ordered: Sequence[float], fraction: float) -> None:
    if not ordered:
        raise ValueError("a quantile of no values")
    if not 0.0 <= fraction <= 1.0:  # also for NaN
        raise ValueError(f"a quantile at {fraction}, which is not from 0 to 1")

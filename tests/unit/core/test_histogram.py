"""Counts of values by size."""

from __future__ import annotations

import math

import pytest

from outrider.core.histogram import REQUEST_S, STEP_S, TOKENS, Histogram


def test_bounds_are_inclusive_and_counts_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 4), (math.inf, 5)]
    assert (histogram.count, histogram.sum) == (5, 8.0)


def test_a_value_may_count_several_times() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.25, 4)
    assert (histogram.count, histogram.sum, histogram.cumulative()[0]) == (4, 1.0, (1.0, 4))


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_what_is_no_duration_does_not_spoil_the_sum(value: float) -> None:
    histogram = Histogram((1.0,))
    histogram.observe(value)
    assert (histogram.count, histogram.sum) == (1, 0.0)


@pytest.mark.parametrize("bounds", [REQUEST_S, STEP_S, TOKENS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))

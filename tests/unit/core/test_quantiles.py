"""Quantiles, against numpy and against what they are defined as."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.quantiles import nearest_rank, quantile

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60).map(sorted)
FRACTIONS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.025, 0.5, 0.9, 0.975, 0.99, 1.0]))


@given(VALUES, FRACTIONS)
def test_between_neighbours_it_interpolates_as_numpy_does(ordered: list[float], fraction: float) -> None:
    assert quantile(ordered, fraction) == pytest.approx(np.quantile(ordered, fraction), rel=1e-9, abs=1e-6)


@given(VALUES, FRACTIONS)
def test_the_nearest_rank_is_the_smallest_value_that_enough_do_not_exceed(
    ordered: list[float], fraction: float
) -> None:
    found = nearest_rank(ordered, fraction)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= fraction * len(ordered)
    assert found == ordered[0] or sum(value < found for value in ordered) < fraction * len(ordered)


def test_known_ones() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert nearest_rank([3.0], 0.99) == 3.0
    assert nearest_rank([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert nearest_rank([float(value) for value in range(1, 101)], 0.99) == 99.0


@pytest.mark.parametrize("function", [quantile, nearest_rank])
def test_nothing_has_none_and_fractions_are_such(function) -> None:
    with pytest.raises(ValueError, match="no values"):
        function([], 0.5)
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="from 0 to 1"):
            function([1.0], fraction)

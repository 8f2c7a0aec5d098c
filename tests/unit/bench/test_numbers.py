"""Percentiles, intervals and schedules on samples whose answers are known."""

from __future__ import annotations

import itertools
import random
import statistics

import numpy as np
import pytest

from outrider.bench.numbers import Distribution, Pair, poisson_arrivals, speed_ratio


def test_percentiles_are_those_of_numpy() -> None:
    rng = random.Random(1)
    for count in (1, 2, 3, 10, 101):
        values = [rng.lognormvariate(0, 1) for _ in range(count)]
        found = Distribution.of(values)
        assert found is not None
        assert found.count == count
        assert found.mean == pytest.approx(np.mean(values))
        for fraction, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
            assert value == pytest.approx(np.percentile(values, fraction))


def test_nothing_has_no_percentiles() -> None:
    assert Distribution.of([]) is None


def test_a_ratio_counts_all_tokens_and_all_time() -> None:
    pairs = [Pair(10, 1.0, 10, 0.5), Pair(30, 3.0, 60, 2.0)]  # 40 tokens in 4 s, 70 in 2.5 s
    found = speed_ratio(pairs, seed=0)
    assert found is not None
    assert found.value == pytest.approx(2.8)
    assert found.low is not None
    assert found.high is not None
    assert 2.0 <= found.low <= found.value <= found.high <= 3.0 + 1e-9
    assert found.pairs == 2


def test_the_interval_is_repeatable_and_covers_the_truth() -> None:
    assert speed_ratio(_drawn(0), seed=5) == speed_ratio(_drawn(0), seed=5)
    covered = 0
    for number in range(100):
        found = speed_ratio(_drawn(number), seed=number, resamples=200)
        assert found is not None
        covered += found.low < 1.5 < found.high  # type: ignore[operator]
    assert 85 <= covered <= 100  # 95 by the level; bootstrap intervals of 30 pairs are a little narrow


def _drawn(number: int) -> list[Pair]:
    """Requests of very different sizes, 1.5 times as fast in the second arm but for noise."""
    rng = random.Random(number)
    pairs = []
    for _ in range(30):
        seconds = rng.uniform(0.5, 10)
        pairs.append(Pair(10 * seconds, seconds, 10 * seconds, seconds / 1.5 * rng.uniform(0.8, 1.2)))
    return pairs


def test_too_little_gives_no_interval() -> None:
    assert speed_ratio([], seed=0) is None
    assert speed_ratio([Pair(0, 0, 5, 1)], seed=0) is None
    alone = speed_ratio([Pair(10, 1, 10, 0.5)], seed=0)
    assert alone is not None
    assert (alone.value, alone.low, alone.high) == (2.0, None, None)


def test_arrivals_are_a_poisson_process_that_can_be_repeated() -> None:
    times = poisson_arrivals(4000, 20.0, seed=3)
    assert times == poisson_arrivals(4000, 20.0, seed=3)
    assert times != poisson_arrivals(4000, 20.0, seed=4)
    assert times[0] == 0.0
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.06)  # an exponential's is its mean
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(np.exp(-1), abs=0.03)
    with pytest.raises(ValueError, match="rate"):
        poisson_arrivals(1, 0.0, seed=0)

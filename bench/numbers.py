"""The arithmetic of a benchmark: percentiles, intervals for ratios, and when requests arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.quantiles import quantile

RESAMPLES = 2000
LEVEL = 0.95  # of intervals


@dataclass(frozen=True)
class Distribution:
    """Of some values: how many, their mean, median and tail."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Distribution | None:
        """None of no values."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (quantile(ordered, fraction) for fraction in (0.5, 0.9, 0.99))
        return Distribution(len(ordered), sum(ordered) / len(ordered), p50, p90, p99)


@dataclass(frozen=True)
class Ratio:
    """A ratio and the interval in which it lies with probability ``LEVEL``; None where there is too little to say."""

    value: float
    low: float | None
    high: float | None
    pairs: int


@dataclass(frozen=True)
class Pair:
    """The same request in both arms: tokens, and seconds that they took."""

    base_tokens: float
    base_seconds: float
    tokens: float
    seconds: float


def speed_ratio(pairs: Sequence[Pair], *, seed: int, resamples: int = RESAMPLES) -> Ratio | None:
    """Tokens per second of the second arm over those of the first, over all pairs together.

    The interval is a percentile bootstrap over pairs (Efron, Tibshirani 1993, chapter 13): what is drawn again is a
    request in both arms, so that what makes one request slower than another falls out. None without pairs.
    """
    value = _ratio(pairs)
    if value is None:
        return None
    if len(pairs) < 2:
        return Ratio(value, None, None, len(pairs))
    rng = random.Random(seed)
    drawn = [_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(resamples)]
    ordered = sorted(ratio for ratio in drawn if ratio is not None)
    tail = (1 - LEVEL) / 2
    return Ratio(value, quantile(ordered, tail), quantile(ordered, 1 - tail), len(pairs))


def _ratio(pairs: Sequence[Pair]) -> float | None:
    base_tokens, base_seconds = sum(pair.base_tokens for pair in pairs), sum(pair.base_seconds for pair in pairs)
    tokens, seconds = sum(pair.tokens for pair in pairs), sum(pair.seconds for pair in pairs)
    if min(base_tokens, base_seconds, seconds) <= 0:
        return None
    return (tokens / seconds) / (base_tokens / base_seconds)


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which ``count`` requests arrive, ``rate`` a second on average; the first at 0.

    The same seed gives the same times, whoever is measured.
    """
    if rate <= 0:
        raise ValueError(f"a rate of {rate}")
    rng = random.Random(f"arrivals/{seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times

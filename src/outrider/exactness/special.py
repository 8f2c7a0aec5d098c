"""The few distribution functions that the tests need, in plain Python: an installation needs no scipy for them."""

from __future__ import annotations

import math
from statistics import NormalDist

_NORMAL = NormalDist()


def normal_two_sided(z: float) -> float:
    """P(|Z| >= |z|)."""
    return math.erfc(abs(z) / math.sqrt(2.0))


def normal_quantile(p: float) -> float:
    """The z with P(Z <= z) = p."""
    return _NORMAL.inv_cdf(p)


def chi2_sf(x: float, freedom: int) -> float:
    """P(X >= x) for chi-square with a whole number of degrees of freedom.

    By the finite sums for half-integer shapes (Abramowitz and Stegun 26.4.4 and 26.4.5); every term is positive, so
    small tails keep their relative precision.
    """
    if freedom < 1:
        raise ValueError(f"freedom is {freedom}, but must be at least 1")
    if x <= 0.0:
        return 1.0
    half = x / 2.0
    if freedom % 2 == 0:
        total, first = 0.0, 0.0
    else:
        total, first = math.erfc(math.sqrt(half)), 0.5
    # half^(i + first) / Gamma(i + first + 1) for i = 0 .. : terms of a Poisson-like sum, in logarithms.
    for i in range(freedom // 2):
        shape = i + first
        total += math.exp(shape * math.log(half) - half - math.lgamma(shape + 1.0))
    return min(1.0, total)


def chi2_quantile(tail: float, freedom: int) -> float:
    """The x with P(X >= x) = tail."""
    low, high = 0.0, float(freedom) + 10.0
    while chi2_sf(high, freedom) > tail:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if chi2_sf(middle, freedom) > tail else (low, middle)
    return high


def noncentral_chi2_sf(x: float, freedom: int, noncentrality: float) -> float:
    """P(X >= x): a Poisson mixture of central ones with 2j more degrees of freedom."""
    rate = noncentrality / 2.0
    if rate == 0.0:
        return chi2_sf(x, freedom)
    spread = 12.0 * math.sqrt(rate) + 12.0
    total = 0.0
    for j in range(max(0, int(rate - spread)), int(rate + spread) + 1):
        weight = math.exp(j * math.log(rate) - rate - math.lgamma(j + 1.0))
        total += weight * chi2_sf(x, freedom + 2 * j)
    return min(1.0, total)


def kolmogorov_sf(distance: float, count: int) -> float:
    """P(D >= distance) of the two-sided one-sample statistic, by its limit with Stephens' correction for finite samples
    (J. R. Statist. Soc. B 32, 1970). Good to a few per cent of itself in the tail from 100 samples on."""
    root = math.sqrt(count)
    t = distance * (root + 0.12 + 0.11 / root)
    if t < 0.2:
        return 1.0
    total = sum((-1.0) ** (j - 1) * math.exp(-2.0 * (j * t) ** 2) for j in range(1, 101))
    return min(1.0, max(0.0, 2.0 * total))

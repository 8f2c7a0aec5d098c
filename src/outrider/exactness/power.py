"""How many tokens it takes to find a deviation, and which deviation a number of tokens finds.

The argument. Let a server deviate so that, averaged over N tokens, the frequencies of the cells of one partition lie
``d`` away from what the oracle expects, with sum(|d|) / 2 = delta: a total variation of delta between the *cells*. The
statistic of that partition (``family.cells_test``) is chi-square with C - 1 degrees of freedom, and its noncentrality
is N d' V^-1 d, where V is the mean covariance of one token's cell. With pi the cells' mean expectations,
V <= diag(pi) - pi pi' (rows differ, and the covariance of a mixture is the larger one), so that

    noncentrality >= N sum(d^2 / pi) >= N (sum |d|)^2 = 4 N delta^2

by Cauchy and Schwarz, whatever the direction and whatever the masses. The u of an order, counted in bins, are the case
where each row's cells have the masses of the bins.

The assumption about the direction. A deviation of the rows counts as far as it moves mass between cells of at least
one of the partitions *with the same sign on average*: from the likely tokens to the unlikely ones, from tokens that
the text holds to new ones, from those that a control raises to those that it lowers, from any fixed set of tokens to
the others as far as the hash cells tell them apart, or early in u to late. A deviation that favours other tokens in
each row, without relation to any of these, cancels out and is not promised to be found. (The draft's own favourites are
such tokens unless the draft is named to the harness, which then adds an order of its own.)
"""

from __future__ import annotations

import math

from outrider.exactness.special import chi2_quantile, noncentral_chi2_sf

POWER = 0.99
# One favoured token shares its hash cell with a sixteenth of all tokens, and loses as much as those do.
KEPT_BY_CELLS = 15.0 / 16.0


def needed_noncentrality(freedom: int, level: float, power: float = POWER) -> float:
    """The smallest at which a chi-square test at that level reaches that power."""
    bound = chi2_quantile(level, freedom)
    low, high = 0.0, bound + 10.0
    while noncentral_chi2_sf(bound, freedom, high) < power:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if noncentral_chi2_sf(bound, freedom, middle) < power else (low, middle)
    return high


def tokens_needed(deviation: float, *, freedom: int, level: float, power: float = POWER) -> int:
    """Tokens that find a total variation of ``deviation`` by a partition of ``freedom`` + 1 cells (see above)."""
    kept = deviation * KEPT_BY_CELLS
    return math.ceil(needed_noncentrality(freedom, level, power) / (4.0 * kept * kept))


def smallest_deviation(num_tokens: int, *, freedom: int, level: float, power: float = POWER) -> float:
    """The total variation that ``num_tokens`` tokens find; 1 if they find none."""
    if num_tokens < 1:
        return 1.0
    found = math.sqrt(needed_noncentrality(freedom, level, power) / (4.0 * num_tokens)) / KEPT_BY_CELLS
    return min(1.0, found)


def greedy_tokens_needed(deviation: float, power: float = POWER) -> int:
    """Tokens among which a wrong one is seen if a share ``deviation`` of them is wrong."""
    return math.ceil(math.log1p(-power) / math.log1p(-deviation))


def greedy_smallest_deviation(num_tokens: int, power: float = POWER) -> float:
    return 1.0 if num_tokens < 1 else -math.expm1(math.log1p(-power) / num_tokens)

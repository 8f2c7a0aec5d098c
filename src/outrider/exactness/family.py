"""The family of tests: each says how likely evidence like this is if the server is exact.

Under exactness, given everything before a token, its u is uniform, and the chance of each cell is its mass. So sums
over tokens are sums of martingale differences, whatever the texts and however long: no test needs two texts to be
alike.

False alarms: every test is made at level ``FAMILY_LEVEL / MAX_TESTS``, so that all together raise a false alarm in at
most one of a thousand checks (Bonferroni; ``rejected`` names the guilty by Holm's steps). Cells that expect fewer than
``MIN_EXPECTED`` tokens are merged, so that the limit distributions hold in the tails that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from outrider.exactness.evidence import Cells, Evidence
from outrider.exactness.special import chi2_sf, kolmogorov_sf, normal_two_sided

FAMILY_LEVEL = 1e-3
MAX_TESTS = 40
LEVEL = FAMILY_LEVEL / MAX_TESTS
MIN_EXPECTED = 100.0
MIN_COUNT = 500  # tokens below which a test is not made

# Fine at the ends, where the likeliest and the unlikeliest tokens are.
BIN_EDGES = np.array([0, 0.002, 0.01, 0.04, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99, 0.998, 1.0])
# The largest number of cells of a partition, less one: what power is reckoned with.
FREEDOM = len(BIN_EDGES) - 2


def family(evidence: Evidence, num_speculative_tokens: int) -> dict[str, float]:
    """p-values by the names of the tests."""
    return {name: test() for name, test in named_tests(evidence, num_speculative_tokens).items()}


def named_tests(evidence: Evidence, num_speculative_tokens: int) -> dict[str, Callable[[], float]]:
    """The tests by their names. With speculation, also for tokens at chosen places in their rounds: a fault that
    touches only the rows behind a whole accepted block, or only the first rows, shows there at full size."""
    made: dict[str, Callable[[], float]] = {}
    for name, cells in evidence.cells.items():
        made[f"cells of {name}"] = partial(cells_test, cells)
    for order, u in evidence.u.items():
        made[f"u by {order}"] = partial(uniform_test, u)
        made[f"u by {order}, largest gap"] = partial(gap_test, u)
    made["likelihood"] = partial(likelihood_test, evidence)
    made["rarest token"] = partial(rarest_test, evidence.tail)
    made["neighbours in a text"] = partial(neighbours_test, evidence)
    made["texts of one prompt"] = partial(siblings_test, evidence)
    if num_speculative_tokens > 0:
        for name, chosen in places(evidence.place, num_speculative_tokens).items():
            made[f"u, {name}"] = partial(_uniform_test_of, evidence.u["likelihood"], chosen)
            made[f"cells of rank, {name}"] = partial(_cells_test_of, evidence.cells["rank"], chosen)
            made[f"cells of repeats, {name}"] = partial(_cells_test_of, evidence.cells["repeats"], chosen)
    return made


def _uniform_test_of(u: np.ndarray, chosen: np.ndarray) -> float:
    return uniform_test(u[chosen])


def _cells_test_of(cells: Cells, chosen: np.ndarray) -> float:
    return cells_test(Cells(cells.cell[chosen], cells.mass[chosen]))


def places(place: np.ndarray, num_speculative_tokens: int) -> dict[str, np.ndarray]:
    """Names of places in a round -> which tokens lie there."""
    return {
        "first of a round": place == 0,
        "inside a round": (place > 0) & (place < num_speculative_tokens),
        "behind a whole block": place >= num_speculative_tokens,
    }


def rejected(p_values: Mapping[str, float]) -> list[str]:
    """The tests that fail at ``FAMILY_LEVEL`` together, worst first (Holm, with room for ``MAX_TESTS``)."""
    if len(p_values) > MAX_TESTS:
        raise ValueError(f"{len(p_values)} tests, but false alarms are reckoned for {MAX_TESTS}")
    failed = []
    for rank, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p_value * (MAX_TESTS - rank) > FAMILY_LEVEL:
            break
        failed.append(name)
    return failed


def uniform_test(u: np.ndarray) -> float:
    """Pearson's chi-square on bins that are fine at both ends."""
    if len(u) < MIN_COUNT:
        return 1.0
    observed = np.histogram(u, BIN_EDGES)[0].astype(float)
    return pearson_test(observed, len(u) * np.diff(BIN_EDGES))


def pearson_test(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts [C] against expectations of the same sum; small neighbours are merged."""
    groups = merged(expected)
    if groups.max() == 0:
        return 1.0
    observed, expected = np.bincount(groups, observed), np.bincount(groups, expected)
    return chi2_sf(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def gap_test(u: np.ndarray) -> float:
    """Kolmogorov-Smirnov."""
    count = len(u)
    if count < MIN_COUNT:
        return 1.0
    ordered = np.sort(u)
    steps = np.arange(count + 1) / count
    distance = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
    return kolmogorov_sf(distance, count)


def cells_test(cells: Cells) -> float:
    """Counts of cells against the sum of their masses, by the masses' own covariance: chi-square with C - 1 degrees."""
    count, num_cells = cells.mass.shape
    if count < MIN_COUNT:
        return 1.0
    expected = cells.mass.sum(axis=0)
    groups = merged(expected)
    num_groups = int(groups.max()) + 1
    if num_groups < 2:
        return 1.0
    join = np.zeros((num_cells, num_groups))
    join[np.arange(num_cells), groups] = 1.0
    expected = expected @ join  # [G]
    observed = np.bincount(cells.cell, minlength=num_cells) @ join
    difference = observed - expected
    covariance = np.diag(expected) - join.T @ (cells.mass.T @ cells.mass) @ join
    # The counts sum to N, so one group says nothing that the others do not.
    d, v = difference[1:], covariance[1:, 1:]
    # Rows in which a group is certain add nothing to its variance: a group may have none, and then must fit exactly.
    spread = np.linalg.eigvalsh(v)
    if spread[0] < 1e-9 * max(spread[-1], 1.0):
        return 1.0 if float(np.abs(d).max()) < 1e-6 else chi2_sf(float(d @ np.linalg.pinv(v) @ d), num_groups - 1)
    return chi2_sf(float(d @ np.linalg.solve(v, d)), num_groups - 1)


def merged(expected: np.ndarray, least: float = MIN_EXPECTED) -> np.ndarray:
    """Group of each cell [C] int64: neighbours together until each group expects ``least``."""
    groups = np.zeros(len(expected), dtype=np.int64)
    group, size = 0, 0.0
    for cell, value in enumerate(expected):
        if size >= least:
            group, size = group + 1, 0.0
        groups[cell] = group
        size += float(value)
    if size < least and group > 0:
        groups[groups == group] = group - 1
    return groups


def likelihood_test(evidence: Evidence) -> float:
    """Sum of log p against its expectation: sees temperatures that differ."""
    variance = float(evidence.log_variance.sum())
    if len(evidence) < MIN_COUNT or variance < MIN_EXPECTED * 1e-3:
        return 1.0
    total = float((evidence.log_likelihood - evidence.log_mean).sum())
    return normal_two_sided(total / math.sqrt(variance))


def rarest_test(tail: np.ndarray) -> float:
    """Whether a token came that hardly ever should have (by the union bound)."""
    return min(1.0, len(tail) * float(tail.min())) if len(tail) else 1.0


def neighbours_test(evidence: Evidence) -> float:
    """Correlation of the u of neighbouring tokens of one text."""
    u = evidence.u["likelihood"]
    follows = (evidence.text[1:] == evidence.text[:-1]) & (evidence.index[1:] == evidence.index[:-1] + 1)
    return correlation_test(u[:-1][follows], u[1:][follows])


def siblings_test(evidence: Evidence) -> float:
    """Correlation of the u of texts that continue one prompt, token by token: seeds and choices must be independent."""
    u = evidence.u["likelihood"]
    order = np.lexsort((evidence.text, evidence.index, evidence.prompt))
    same = (evidence.prompt[order][1:] == evidence.prompt[order][:-1]) & (
        evidence.index[order][1:] == evidence.index[order][:-1]
    )
    return correlation_test(u[order][:-1][same], u[order][1:][same])


def correlation_test(one: np.ndarray, other: np.ndarray) -> float:
    """Pairs of uniforms: 12 (a - 1/2)(b - 1/2) has mean 0 and variance 1 if they are independent."""
    if len(one) < MIN_COUNT:
        return 1.0
    return normal_two_sided(float((12.0 * (one - 0.5) * (other - 0.5)).sum()) / math.sqrt(len(one)))

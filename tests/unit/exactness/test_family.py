"""Single tests of the family, on evidence that is made by hand; their error rates are shown in tests/statistical."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from outrider.exactness.compare import different_texts, homogeneity_test, two_samples
from outrider.exactness.evidence import Cells, Evidence
from outrider.exactness.family import (
    LEVEL,
    MAX_TESTS,
    cells_test,
    family,
    gap_test,
    merged,
    neighbours_test,
    pearson_test,
    places,
    rarest_test,
    rejected,
    siblings_test,
    uniform_test,
)
from outrider.exactness.sampler import Text

COUNT = 4800


def exact(seed: int = 0) -> Evidence:
    """Tokens of one made-up row of five tokens; texts of 48 tokens, 16 prompts."""
    rng = np.random.default_rng(seed)
    probs = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    token = rng.choice(5, COUNT, p=probs)
    before = np.cumsum(probs) - probs
    u = before[token] + rng.random(COUNT) * probs[token]
    mass = np.tile(probs, (COUNT, 1))
    number = np.arange(COUNT)
    logs = np.log(probs)
    mean = (probs * logs).sum()
    return Evidence(
        text=number // 48,
        prompt=number // 48 % 16,
        index=number % 48,
        token=token,
        place=number % 5,
        u={"likelihood": u, "shuffle": 1.0 - u},
        cells={"rank": Cells(token, mass), "repeats": Cells(token, mass)},
        tail=1.0 - before[token],
        log_likelihood=logs[token],
        log_mean=np.full(COUNT, mean),
        log_variance=np.full(COUNT, (probs * logs**2).sum() - mean**2),
    )


def test_exact_evidence_passes_and_names_every_test_once() -> None:
    p_values = family(exact(), 4)
    assert rejected(p_values) == []
    assert len(p_values) <= MAX_TESTS
    assert len(family(exact(), 0)) == len(p_values) - 9, "without speculation there are no places"


def test_dependence_is_seen() -> None:
    evidence = exact()
    u = evidence.u["likelihood"].copy()
    u[1:] = np.where(evidence.index[1:] % 2 == 1, u[:-1], u[1:])  # every second token repeats its neighbour's number
    assert neighbours_test(replace(evidence, u={"likelihood": u})) < 1e-9
    same = exact().u["likelihood"].reshape(-1, 48)
    same[16:] = same[:-16]  # texts of one prompt all alike
    assert siblings_test(replace(evidence, u={"likelihood": same.ravel()})) < 1e-9
    assert neighbours_test(evidence) > LEVEL
    assert siblings_test(evidence) > LEVEL


def test_a_token_that_hardly_ever_comes() -> None:
    tail = np.random.default_rng(0).random(1000)
    assert rarest_test(tail) > LEVEL
    assert rarest_test(np.append(tail, 1e-9)) == pytest.approx(1001e-9)
    assert rarest_test(np.empty(0)) == 1.0


def test_pearson_is_scipys() -> None:
    observed, expected = np.array([1030.0, 950.0, 1020.0]), np.full(3, 1000.0)
    assert pearson_test(observed, expected) == pytest.approx(scipy.stats.chisquare(observed, expected).pvalue)
    assert pearson_test(np.array([3.0, 2.0]), np.array([2.5, 2.5])) == 1.0, "too few to say anything"


def test_gap_and_bins_are_scipys() -> None:
    u = np.random.default_rng(1).random(3000) ** 1.05
    assert gap_test(u) == pytest.approx(scipy.stats.kstest(u, "uniform").pvalue, rel=0.05)
    assert gap_test(u[:100]) == uniform_test(u[:100]) == 1.0


def test_cells_that_cannot_vary_must_fit() -> None:
    mass = np.tile([0.5, 0.5, 0.0], (1000, 1))
    cells = np.arange(1000) % 2
    assert cells_test(Cells(cells, mass)) > 0.9
    certain = np.zeros((1000, 2))
    certain[np.arange(1000), cells] = 1.0
    assert cells_test(Cells(cells, certain)) == 1.0


def test_cells_of_different_rows_use_the_exact_covariance() -> None:
    """Half of the rows nearly certain: counts vary less than a chi-square of the totals believes."""
    rng = np.random.default_rng(2)
    chance = np.where(np.arange(4000) % 2 == 0, 0.999, 0.5)
    mass = np.stack([chance, 1.0 - chance], axis=1)
    p_values = [cells_test(Cells((rng.random(4000) > chance).astype(int), mass)) for _ in range(300)]
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 1e-6


def test_merging_keeps_neighbours_together() -> None:
    assert merged(np.array([50.0, 60.0, 200.0, 10.0, 5.0])).tolist() == [0, 0, 1, 1, 1]
    assert merged(np.array([1.0, 2.0])).tolist() == [0, 0]
    assert merged(np.array([300.0, 300.0])).tolist() == [0, 1]


def test_places_are_disjoint_and_complete() -> None:
    found = places(np.arange(8), 4)
    assert np.stack(list(found.values())).sum(axis=0).tolist() == [1] * 8
    assert np.flatnonzero(found["behind a whole block"]).tolist() == [4, 5, 6, 7]


def test_holm_names_the_guilty() -> None:
    assert rejected({"a": LEVEL * 0.9, "b": LEVEL * 1.01, "c": 0.5}) == ["a", "b"]
    assert rejected({"a": LEVEL * 1.1, "b": 0.5}) == []
    with pytest.raises(ValueError, match="41 tests"):
        rejected({str(i): 0.5 for i in range(MAX_TESTS + 1)})


def test_two_samples_of_one_server_agree_and_of_two_do_not() -> None:
    one, two = exact(3), exact(4)
    p_values = two_samples(one, two, 4)
    assert set(p_values) >= {"with and without speculation, token 1 of the output"}
    assert min(p_values.values()) > LEVEL
    other = replace(two, token=np.where(two.token == 4, 0, two.token), u={n: v**1.5 for n, v in two.u.items()})
    found = two_samples(one, other, 4)
    assert found["with and without speculation, u by likelihood"] < 1e-9
    assert two_samples(one, two.where(np.arange(COUNT) < 100), 4) == {}


def test_homogeneity_is_scipys() -> None:
    table = np.array([[120, 80, 100], [70, 75, 60]])
    wanted = scipy.stats.chi2_contingency(table, correction=False).pvalue
    assert homogeneity_test([table]) == pytest.approx(wanted)
    assert homogeneity_test([np.array([[3, 2], [1, 1]])]) == 1.0


def text(output: tuple[int, ...], seed: int = 5) -> Text:
    return Text(0, (1,), seed, 0, output, (0,) * len(output), None, None, True, "coupled", 0, 0, 0)


def test_different_texts_are_told_by_their_first_difference() -> None:
    same = [text((1, 2, 3))]
    assert different_texts(same, same) == []
    assert different_texts(same, [text((1, 9, 3))]) == ["seed 5, choice 0: from token 1 of the output on"]
    assert different_texts(same, [text((1, 2))]) == ["seed 5, choice 0: from token 2 of the output on"]
    with pytest.raises(ValueError, match="shorter"):
        different_texts(same, [])

"""How often the harness errs, by simulation: streams that are exact, and streams that deviate by a planted amount.

Rates of these tests themselves, were the harness as good as it claims: exact streams, at most 4 alarms in ``NUM_EXACT``
= 500 checks at a rate of 1e-3: more come with probability 2e-4. Planted deviations, at most 6 of ``NUM_PLANTED`` = 120
missed at a rate of 0.01: more come with probability 2e-4. So all tests of the module together fail by chance in one run
of two hundred at most; in fact much more rarely, since most deviations are found far more often than promised. The
seeds are fixed, so that they do not fail by chance at all.
"""

from __future__ import annotations

import numpy as np
import pytest

from outrider.exactness.family import BIN_EDGES, FREEDOM, LEVEL, MAX_TESTS, family, named_tests, pearson_test, rejected
from outrider.exactness.power import POWER, smallest_deviation, tokens_needed

from .simulation import DEVIATIONS, Model, Streams, total_variation

SIZE = 0.02
NUM_TOKENS = tokens_needed(SIZE, freedom=FREEDOM, level=LEVEL)
NUM_EXACT, MAX_ALARMS = 500, 4
NUM_PLANTED, MAX_MISSED = 120, 6
K = 4

VOCABULARIES = {"small": (1_500, 24), "full": (151_936, 5)}


@pytest.fixture(scope="module", params=VOCABULARIES)
def model(request: pytest.FixtureRequest) -> Model:
    return Model.make(*VOCABULARIES[request.param], seed=1)


@pytest.mark.slow
def test_exact_streams_pass(model: Model) -> None:
    """With fewer tokens than a check takes, where the limit distributions are worse, and the rate is the same."""
    rng = np.random.default_rng(2)
    streams = Streams(model, model.probs, NUM_TOKENS // 6)
    alarms, p_values = 0, []
    for _ in range(NUM_EXACT):
        found = family(streams.draw(rng), K)
        alarms += bool(rejected(found))
        p_values.append(list(found.values()))
    assert len(found) <= MAX_TESTS
    assert alarms <= MAX_ALARMS, f"{alarms} of {NUM_EXACT}"
    # Each test at a level that shows within so few streams: 5 of 500 are expected, more than 18 come with 1e-6.
    below = (np.array(p_values) < 0.01).sum(axis=0)
    print(dict(zip(found, below.tolist(), strict=True)))
    assert below.max() <= 18, dict(zip(found, below.tolist(), strict=True))


@pytest.mark.slow
def test_exact_streams_of_full_length_pass(model: Model) -> None:
    rng = np.random.default_rng(3)
    streams = Streams(model, model.probs, NUM_TOKENS)
    alarms = sum(bool(rejected(family(streams.draw(rng), K))) for _ in range(60))
    assert alarms <= 1  # two or more come with 1.7e-3


@pytest.mark.slow
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_planted_deviations_are_found(model: Model, deviation: str) -> None:
    law = DEVIATIONS[deviation](model, SIZE)
    assert np.allclose(law.sum(axis=1), 1.0)
    assert law.min() >= 0.0
    assert total_variation(law, model.probs) <= SIZE * 1.0001
    assert total_variation(law, model.probs) >= SIZE * 0.9, "too few rows can give so much"
    rng = np.random.default_rng(4)
    streams = Streams(model, law, NUM_TOKENS)
    missed = sum(not is_found(streams, rng) for _ in range(NUM_PLANTED))
    print(deviation, "missed", missed)
    assert missed <= MAX_MISSED, f"missed {missed} of {NUM_PLANTED}"


def is_found(streams: Streams, rng: np.random.Generator) -> bool:
    """Whether any test rejects: Holm's first step."""
    return any(test() <= LEVEL for test in named_tests(streams.draw(rng), K).values())


def test_the_worst_direction_is_found_as_often_as_promised() -> None:
    """Counts of bins against the deviation that the bound of ``power`` is sharp for: half of the mass raised."""
    rng = np.random.default_rng(5)
    expected = np.diff(BIN_EDGES)
    raised = BIN_EDGES[:-1] < 0.5
    shift = SIZE * np.where(raised, expected / expected[raised].sum(), -expected / expected[~raised].sum())
    kept = 15.0 / 16.0
    counts = rng.multinomial(NUM_TOKENS, expected + kept * shift, size=4000)
    found = np.mean([pearson_test(count.astype(float), NUM_TOKENS * expected) <= LEVEL for count in counts])
    # The mean of 4000 lies within 0.0063 (four standard errors) of its expectation.
    assert abs(found - POWER) < 0.0063, found


def test_smallest_deviation_is_the_inverse_of_the_tokens_needed() -> None:
    assert smallest_deviation(NUM_TOKENS, freedom=FREEDOM, level=LEVEL) == pytest.approx(SIZE, rel=1e-4)
    assert smallest_deviation(0, freedom=FREEDOM, level=LEVEL) == 1.0
    assert 3.9 < tokens_needed(SIZE / 2, freedom=FREEDOM, level=LEVEL) / NUM_TOKENS < 4.1

"""Committed text follows the target's own distribution: rejection and coupled, small vocabularies and a full one.

The one-hot scenario is the right side of case S4: a draft that proposes its argmax says so, and the text is exact.
Judge, scenarios and false-alarm rate are described in ``harness``; what the judge can see is shown by
``test_planted_bugs``.
"""

from dataclasses import replace

import numpy as np
import pytest

from .harness import FULL, SMALL, Decoder, Outcome, Scenario, SingleDecoder, check


@pytest.mark.parametrize("scenario", SMALL + FULL, ids=lambda scenario: scenario.name)
def test_texts_follow_the_target(scenario: Scenario) -> None:
    report = check(scenario)
    print(scenario.name, report)
    assert report.outcome is Outcome.PASSED, str(report)


@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.name)
def test_one_by_one_gives_the_same_texts(scenario: Scenario) -> None:
    """What the batches above prove holds for ``draw`` and ``verify_chain``: the texts are equal, token by token."""
    few = replace(scenario, num_texts=40)
    assert np.array_equal(Decoder(few).run().tokens, SingleDecoder(few).run().tokens)

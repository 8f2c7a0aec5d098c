"""The judge of ``test_exactness`` finds these bugs, with the scenarios and the number of texts with which right code
passes.

What the target draws
  - bonus token from q (``BonusFromDraft``)
  - a rejected token replaced by a draw from p (``ReplacementFromTarget``)
  - residual not normalised (``ResidualNotNormalised``), or taken twice (``ResidualTwice``)
  - a ratio relaxed for speed (``LenientAcceptance``)
  - temperature on one side only: the draft's draw (``TargetWithoutTemperature``, under rejection and coupled), or all
    but the draft's report (``DraftReportsWithoutTemperature``)
  - top-k and top-p on one side only (``TargetWithoutFilters``, under rejection and coupled)
  - a proposal judged by the row before its own (``RowsShifted``)

What a draft says
  - case S4: proposes its argmax, reports its softmax (``ArgmaxReportedAsSoftmax``)
  - draws from the whole q and bends the truncated row so that it holds the token (``RowBentToItsToken``)
  - draws from the whole q, reports the truncated and renormalised one (``DrawnBeforeTruncation``: exact, because a
    token outside its row counts as absent, but acceptance is below what the rows promise)

Which proposals are offered
  - a drawn token withheld because it looked unlikely (``UnlikelyWithheld``)
  - the better-looking of two drafters heard (``BetterOfTwoDrafters``)

What survives a rejection
  - suffix kept (``SuffixKept``, under rejection and coupled)
  - stale KV in the target (``TargetCacheStale``, under rejection and coupled) and in the draft (``DraftCacheStale``:
    exact, but acceptance is below what the pair of models gives)
  - a round without luck run again with other numbers (``AcceptedAgain``, under rejection and coupled)

Random numbers
  - noise keyed by the output index: a second turn meets the noise that wrote its prompt (``NoiseByOutputIndex``, under
    coupled and rejection), or by nothing that moves (``NoiseWithoutPosition``)
  - accept noise shared with the draft's draw (``NoiseWithoutPurpose``)
  - coupled, but a mismatch drawn afresh (``RedrawnOnMismatch``)
  - 24-bit uniforms on a vocabulary of 151,936 (``Uniforms24Bits``)
  - ``u q <= p`` accepting a token of probability zero (``AcceptsWhenEqual``)
"""

from dataclasses import replace

import numpy as np
import pytest

from . import bugs
from .controlled import CONTROLLED
from .harness import LEVEL, MAX_TESTS, SCENARIOS, Decoder, Outcome, Scenario, Texts, check, judge

PLANTED = [
    (bugs.BonusFromDraft, "rejection"),
    (bugs.ReplacementFromTarget, "rejection"),
    (bugs.ResidualNotNormalised, "rejection"),
    (bugs.ResidualTwice, "rejection"),
    (bugs.LenientAcceptance, "rejection"),
    (bugs.TargetWithoutTemperature, "rejection-truncated"),
    (bugs.TargetWithoutTemperature, "coupled-cool"),
    (bugs.DraftReportsWithoutTemperature, "rejection-truncated"),
    (bugs.TargetWithoutFilters, "rejection-filtered"),
    (bugs.TargetWithoutFilters, "coupled-k8"),
    (bugs.RowsShifted, "rejection"),
    (bugs.ArgmaxReportedAsSoftmax, "rejection"),
    (bugs.RowBentToItsToken, "rejection-truncated"),
    (bugs.DrawnBeforeTruncation, "rejection-truncated"),
    (bugs.UnlikelyWithheld, "rejection"),
    (bugs.BetterOfTwoDrafters, "rejection"),
    (bugs.SuffixKept, "rejection"),
    (bugs.SuffixKept, "coupled"),
    (bugs.TargetCacheStale, "rejection"),
    (bugs.TargetCacheStale, "coupled"),
    (bugs.DraftCacheStale, "rejection"),
    (bugs.DraftCacheStale, "coupled"),
    (bugs.AcceptedAgain, "rejection"),
    (bugs.AcceptedAgain, "coupled"),
    (bugs.NoiseByOutputIndex, "coupled"),
    (bugs.NoiseByOutputIndex, "rejection-one-hot"),
    (bugs.NoiseByOutputIndex, "rejection-truncated"),
    (bugs.NoiseWithoutPosition, "coupled"),
    (bugs.NoiseWithoutPurpose, "rejection"),
    (bugs.RedrawnOnMismatch, "coupled"),
    (bugs.Uniforms24Bits, "full-coupled"),
    (bugs.AcceptsWhenEqual, "rejection-filtered"),
]


@pytest.mark.parametrize(("bug", "scenario"), PLANTED, ids=[f"{bug.__name__}-{name}" for bug, name in PLANTED])
def test_a_planted_bug_is_caught(bug: type[bugs.Planted], scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, function in bug.patches:
        monkeypatch.setattr(module, name, function)
    report = check(SCENARIOS[scenario], bug)
    print(bug.__name__, scenario, report)
    assert report.outcome is Outcome.FAILED, str(report)


def test_an_impossible_proposal_does_no_harm_to_right_code() -> None:
    """The counterpart of ``AcceptsWhenEqual``: the same texts, the same constructed proposal, nothing patched."""
    report = check(SCENARIOS["rejection-filtered"], bugs.ImpossibleProposal)
    assert report.outcome is Outcome.PASSED, str(report)


class DraftIsTarget(Decoder):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.draft_logits = self.target_logits


def without_acceptance_test(scenario: Scenario, texts: Texts) -> Texts:
    """Acceptance judged against what happened, so that only the amount of evidence counts."""
    accepted = np.concatenate(texts.judged_accepted) if texts.judged_accepted else np.zeros(0)
    scenario.__dict__["acceptance"] = np.full(scenario.truth.probs.shape[0], accepted.mean() if accepted.size else 0.5)
    return texts


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_a_run_that_saw_no_rejection_or_no_proposal_is_unknown(verifier: str) -> None:
    scenario = replace(SCENARIOS[verifier], num_texts=2000)
    texts = without_acceptance_test(scenario, DraftIsTarget(scenario).run())
    report = judge(scenario, texts)
    assert report.num_accepted > 0
    assert report.outcome is Outcome.UNKNOWN, str(report)
    plain = replace(scenario, num_proposals=0)
    assert judge(plain, Decoder(plain).run()).outcome is Outcome.UNKNOWN


def test_the_suite_makes_fewer_tests_than_its_false_alarm_rate_assumes() -> None:
    scenarios = [*SCENARIOS.values(), *CONTROLLED]
    per_run = max(scenario.length for scenario in scenarios) + 5
    assert per_run * (len(scenarios) + 3) < MAX_TESTS
    assert MAX_TESTS * LEVEL <= 1e-3

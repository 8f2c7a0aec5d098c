"""What a scheduler counts, against the outcomes of its requests."""

from __future__ import annotations

import pytest

from outrider.core.plan import SequencePlan, StepPlan
from outrider.core.proposal import Proposal
from outrider.router.counts import MAX_DRAFTERS, SchedulerCounts
from outrider.router.overhead import step_kind


def proposal(drafter: str = "model") -> Proposal:
    return Proposal(proposal_id=1, base_len=0, base_hash=0, tokens=(1, 2, 3), drafter=drafter)


def test_rounds_are_counted_by_what_proposed() -> None:
    counts = SchedulerCounts()
    counts.verified(proposal(), 3, 2, is_lookup=False)
    counts.verified(proposal(), 3, 0, is_lookup=False)
    counts.verified(proposal("whatever"), 3, 3, is_lookup=True)
    model, lookup = counts.drafters["model"], counts.lookup
    assert (model.num_drafts, model.num_draft_tokens, model.num_accepted_tokens) == (2, 6, 2)
    assert model.histogram == [1, 0, 1]
    assert (lookup.num_drafts, lookup.num_draft_tokens, lookup.histogram) == (1, 3, [0, 0, 0, 1])


def test_names_of_drafters_are_few() -> None:
    counts = SchedulerCounts()
    for number in range(100):
        counts.verified(proposal(f"drafter-{number}"), 3, 1, is_lookup=False)
    assert len(counts.drafters) <= MAX_DRAFTERS + 1
    assert sum(drafter.num_drafts for drafter in counts.drafters.values()) == 100


def sequence(tokens: int, *, proposed: int = 0, decides: bool = True) -> SequencePlan:
    rows = tuple(range(tokens - proposed - 1, tokens)) if decides else ()
    return SequencePlan(1, 1, 0, tuple(range(tokens)), num_proposal_tokens=proposed, logits_rows=rows)


KINDS = {
    "prefill": [sequence(8, decides=False), sequence(5)],
    "mixed": [sequence(8, decides=False), sequence(1)],
    "verify": [sequence(4, proposed=3), sequence(1)],
    "decode": [sequence(1), sequence(1)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_of_four_kinds(kind: str) -> None:
    assert step_kind(StepPlan(1, 1, tuple(KINDS[kind]))) == kind

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.core.errors import InvalidRequest, OutriderError
from outrider.core.plan import SequencePlan, StepPlan, committed_checksum, rows_fault


def test_the_checksum_is_exact_in_a_float_and_ignores_order() -> None:
    lengths = [(seq_id, seq_id * 7 % 50) for seq_id in range(200)]
    shuffled = random.Random(1).sample(lengths, len(lengths))
    checksum = committed_checksum(lengths)
    assert checksum == committed_checksum(shuffled)
    assert int(float(checksum)) == checksum
    assert committed_checksum([]) == 0


def test_the_checksum_sees_one_length_that_differs() -> None:
    assert committed_checksum([(1, 5), (2, 6)]) != committed_checksum([(1, 5), (2, 7)])
    assert committed_checksum([(1, 5), (2, 6)]) != committed_checksum([(1, 6), (2, 5)])


def test_num_rows_counts_every_token() -> None:
    sequences = (SequencePlan(1, 1, 0, (1, 2, 3)), SequencePlan(2, 1, 4, (5,)))
    assert StepPlan(1, 1, sequences).num_rows == 4


ROWS = {
    "a prompt chunk": ((), (), 0, None),
    "the next token": ((3,), (), 0, None),
    "a proposal": ((1, 2, 3), (), 2, None),
    "a last chunk that is scored": ((0, 1, 2, 3), (5, 6, 7), 0, None),
    "the same with a proposal": ((0, 1, 2, 3), (5,), 2, None),
    "an earlier chunk that is scored": ((0, 1, 2, 3), (5, 6, 7, 8), 0, None),
    "a proposal that nobody verifies": ((), (), 2, "is verified with rows 1 to 3"),
    "too few rows": ((2, 3), (), 2, "is verified with rows 1 to 3"),
    "a row that is not there": ((1, 2, 4), (), 2, "logits row 4 does not exist: there are 4"),
    "rows without scored tokens": ((0, 1, 2, 3), (), 0, "is verified with rows 3 to 3"),
    "too few scored tokens": ((0, 1, 2, 3), (5, 6), 0, "3 or all can be scored"),
    "scored proposals": ((0, 1, 2, 3), (5, 6, 7, 8), 2, "1 can be scored"),
    "scored tokens without their rows": ((3,), (5, 6, 7), 0, "wants all 4"),
    "nothing but a proposal": ((0, 1, 2, 3), (), 4, "leave none of 4"),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_do_not_fit_are_told_from_those_that_do(case: str) -> None:
    rows, scored, num_proposal_tokens, reason = ROWS[case]
    plan = SequencePlan(
        1, 1, 0, (1, 2, 3, 4), num_proposal_tokens=num_proposal_tokens, logits_rows=rows, scored_tokens=scored
    )
    fault = rows_fault(plan)
    assert (fault is None) == (reason is None)
    if reason is not None and fault is not None:
        assert reason in fault
    assert rows_fault(replace(plan, tokens=())) is not None


def test_a_plan_tells_its_proposal_from_its_text() -> None:
    plan = SequencePlan(1, 1, 0, (1, 2, 3), num_proposal_tokens=2, logits_rows=(0, 1, 2))
    assert (plan.num_text_tokens, plan.proposal, plan.verified_rows) == (1, (2, 3), (0, 1, 2))
    plan = replace(plan, num_proposal_tokens=0, scored_tokens=(2, 3))
    assert (plan.num_text_tokens, plan.proposal, plan.verified_rows) == (3, (), (2,))


def test_a_wrong_field_is_named_in_one_line() -> None:
    error = InvalidRequest("sampling.top_p", 1.5, "in (0, 1]")
    assert isinstance(error, OutriderError)
    assert (error.field, error.value, error.limit) == ("sampling.top_p", 1.5, "in (0, 1]")
    assert str(error) == "sampling.top_p is 1.5, but must be in (0, 1]"

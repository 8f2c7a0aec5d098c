"""Which passes a profile makes: those that fit, each behind a whole context, as often as wanted, if interrupted too."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.errors import InvalidRequest
from outrider.core.plan import GroupInfo, SequencePlan, StepResult, StepTiming, rows_fault
from outrider.router.profile_plans import ProfileSettings, Spread, Stage, StageSamples, choose_stages, passes

RESULT = StepResult(1, 1, (), timing=StepTiming(total_ms=3.0, plan_ms=0.25, forward_ms=2.0, verify_ms=0.5))


def info(**changes: Any) -> GroupInfo:
    values: dict[str, Any] = {
        "group_id": "g",
        "model": "m",
        "tokenizer_fingerprint": "",
        "vocab_size": 100,
        "max_model_len": 1024,
        "num_blocks": 128,
        "block_size": 16,
        "max_num_batched_tokens": 64,
        "tensor_parallel_size": 1,
        "row_invariant": True,
        "dtype": "float32",
        "max_num_seqs": 8,
    }
    return GroupInfo(**{**values, **changes})


def run(measured: StageSamples, seq_ids: list[int], limit: int = 1000) -> list[tuple[SequencePlan, ...]]:
    """The passes that are made, until there are no more or ``limit``."""
    size = info().block_size
    each = measured.stage.num_blocks(size)
    blocks = [list(range(index * each, (index + 1) * each)) for index in range(len(seq_ids))]
    running = passes(measured, info(), seq_ids, blocks)
    made = [next(running)]
    while len(made) < limit:
        try:
            made.append(running.send((RESULT, 5.0)))
        except StopIteration:
            break
    return made


def test_the_context_is_entered_once_and_each_pass_starts_behind_it() -> None:
    measured = StageSamples(Stage(context=100, num_sequences=2, rows=(1, 5)), num_runs=3)
    made = run(measured, [7, 8])
    entering, measuring = made[:4], made[4:]
    assert [(plan.seq_id, plan.kv_len, len(plan.tokens)) for (plan,) in entering] == [
        (7, 0, 64),
        (7, 64, 36),
        (8, 0, 64),
        (8, 64, 36),
    ]
    assert [len(plans[0].tokens) for plans in measuring] == [1, 5] * 4  # the first turn warms up
    for plans in made:
        assert all(rows_fault(plan) is None for plan in plans)
        assert sum(len(plan.tokens) for plan in plans) <= 64
    for plans in measuring:
        assert [(plan.seq_id, plan.kv_len, plan.block_append) for plan in plans] == [(7, 100, ()), (8, 100, ())]
        assert all(plan.num_proposal_tokens == len(plan.tokens) - 1 for plan in plans)
    assert {rows: len(samples) for rows, samples in measured.samples.items()} == {1: 3, 5: 3}
    sample = measured.samples[1][0]
    assert (sample.forward_ms, sample.overhead_ms, sample.plan_ms, sample.verify_ms) == (2.0, 3.0, 0.25, 0.5)


def test_what_was_measured_before_an_interruption_is_kept() -> None:
    measured = StageSamples(Stage(context=8, num_sequences=1, rows=(1, 5, 9)), num_runs=4)
    run(measured, [7], limit=1 + 3 + 4)  # one for the context, a turn that warms up, a turn and one more
    done = measured.done
    assert 0 < done < measured.total
    run(measured, [9])
    assert measured.done == measured.total
    assert {len(samples) for samples in measured.samples.values()} == {4}


def test_stages_are_those_that_fit() -> None:
    stages, left_out = choose_stages(ProfileSettings(), info())
    assert [stage.context for stage in stages] == [128, 512]
    assert left_out == []  # nobody named the others
    stages, left_out = choose_stages(
        ProfileSettings(rows=(1, 40), contexts=(128, 900, 2000), num_sequences=(1, 2, 8, 9)), info()
    )
    assert [(stage.num_sequences, stage.context, stage.rows) for stage in stages] == [
        (1, 128, (1, 40)),
        (1, 900, (1, 40)),
        (2, 128, (1,)),
        (2, 900, (1,)),
        (8, 128, (1,)),
    ]
    assert len(left_out) == 7
    assert any("8 x 900 positions: they take" in line for line in left_out)


def test_a_group_with_a_short_context_is_measured_at_what_it_has() -> None:
    stages, _ = choose_stages(ProfileSettings(rows=(1, 5)), info(max_model_len=64))
    assert [(stage.context, stage.rows) for stage in stages] == [(59, (1, 5))]


def test_bad_settings_name_the_field() -> None:
    with pytest.raises(InvalidRequest, match="num_runs"):
        ProfileSettings(num_runs=0).check()
    ProfileSettings().check()


def test_a_spread_is_median_smallest_and_largest() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)

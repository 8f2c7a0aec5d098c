"""Joining, leaving, cancelling, starting over: cases V1, V2 and S7, and the queue."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.core.errors import Conflict, GroupError, Overloaded
from outrider.core.plan import SequenceError, SequenceResult, StepResult
from outrider.router.requests import FinishReason
from outrider.router.settings import SchedulerSettings


def test_v1_a_cancelled_rounds_result_does_not_land_in_the_request_that_took_its_id(toy) -> None:
    world = toy.World()
    world.add("r", [1, 2, 3], generation=1)
    world.step()
    world.start()
    old = world.pending
    (end,) = world.scheduler.abort("r", "client went away", world.now)
    assert end.finish.reason is FinishReason.ABORT
    world.add("r", [9, 8], generation=2, max_tokens=4)
    assert world.finish() == []
    assert world.scheduler.complete(old, world.now) == []
    world.run_to_end()
    assert world.texts["r"] == toy.continuation([9, 8], 4)
    assert world.ends["r"].generation == 2
    world.check_ends()


def test_v1_a_proposal_for_the_old_generation_is_dropped(toy) -> None:
    world = toy.World()
    draft = world.join("d")
    world.add("r", [1, 2, 3], generation=1)
    world.step()
    session_id, text = next(iter(draft.texts.items()))
    proposal = draft.propose(text, 3)
    world.scheduler.abort("r", "", world.now)
    world.deliver()
    world.add("r", [1, 2, 3], generation=2)
    world.step()
    assert world.scheduler.draft_proposed("d", session_id, proposal, world.now) == "no such session"
    assert world.scheduler.offer("r", 1, proposal, "d", world.now) == "no such request"


def test_v2_blocks_of_a_cancelled_request_are_free_only_after_the_step_that_writes_them(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=4))
    world.add("a", list(range(12)), max_tokens=3)
    world.start()
    held = world.scheduler.snapshot().num_free_blocks
    assert held == 1
    world.scheduler.abort("a", "", world.now)
    assert world.scheduler.snapshot().num_free_blocks == held
    world.add("b", list(range(14)), max_tokens=2)
    assert world.scheduler.schedule(world.now) is None
    world.finish()
    assert world.scheduler.snapshot().num_free_blocks == 4
    plan = world.start()
    assert len(plan.released) == 1
    world.finish()
    world.run_to_end()
    world.check_ends()


def test_s7_rounds_without_proposals_change_nothing(toy) -> None:
    """The text depends on positions alone: proposals in some rounds, none in others."""
    world = toy.World()
    draft = world.join("d")
    world.add("r", [5, 5, 5], max_tokens=20)
    for turn in range(100):
        if "r" in world.ends:
            break
        for session_id, text in draft.texts.items():
            if turn % 3 == 1:
                world.scheduler.draft_proposed("d", session_id, draft.propose(text, 4, wrong_from=2), world.now)
        world.step()
    assert 0 < world.ends["r"].finish.speculation.num_spec_steps < world.ends["r"].finish.speculation.target_calls
    world.check_ends()


def test_a_full_queue_refuses_one_more_and_a_running_id_is_a_conflict(toy) -> None:
    world = toy.World(settings=SchedulerSettings(max_queue=2, max_num_seqs=1))
    for request_id in "abc":  # one to run, two to wait
        world.add(request_id, [1], max_tokens=2)
    with pytest.raises(Conflict):
        world.scheduler.add(world.requests["a"], 0.0)
    with pytest.raises(Overloaded):
        world.add("d", [1])
    world.step()
    world.step()
    world.add("d", [1], max_tokens=2)
    world.run_to_end()
    assert len(world.ends) == 4
    world.check_ends()


def test_requests_join_and_leave_between_steps(toy) -> None:
    world = toy.World(settings=SchedulerSettings(max_num_seqs=2))
    world.add("a", [1], max_tokens=3)
    world.add("b", [2], max_tokens=1)
    world.add("c", [3], max_tokens=3)
    assert len(world.step().sequences) == 2
    assert "b" in world.ends
    plan = world.step()
    assert len(plan.sequences) == 2
    assert len(plan.released) == 1
    world.run_to_end()
    world.check_ends()


def test_no_more_requests_run_than_the_group_takes_in_a_step(toy) -> None:
    world = toy.World(toy.group_info(max_num_seqs=3))
    for request_id in "abcde":
        world.add(request_id, [1], max_tokens=3)
    assert len(world.step().sequences) == 3
    world.run_to_end()
    world.check_ends()


def test_long_prompts_come_in_chunks_beside_running_decodes(toy) -> None:
    world = toy.World(toy.group_info(max_num_batched_tokens=8))
    world.add("a", [1], max_tokens=12)
    world.step()
    world.add("b", list(range(20)), max_tokens=2)
    rows = []
    while "b" not in world.ends:
        plan = world.step()
        rows.append(tuple(len(sequence.tokens) for sequence in plan.sequences))
    assert rows[:3] == [(1, 7), (1, 7), (1, 6)]
    world.run_to_end()
    world.check_ends()


def test_blocks_run_out_the_request_admitted_last_starts_over(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=6, block_size=2, max_model_len=13))
    world.add("a", [1, 2, 3], max_tokens=9)
    world.add("b", [4, 5, 6], max_tokens=9)
    world.run_to_end()
    assert world.scheduler.snapshot().num_preemptions > 0
    assert list(world.ends) == ["a", "b"]
    world.check_ends()


def test_a_preempted_request_goes_on_before_those_that_came_later(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=6, block_size=2, max_model_len=13), SchedulerSettings(max_num_seqs=2))
    for request_id in "abcd":
        world.add(request_id, [1, 2, 3], max_tokens=9)
    world.run_to_end()
    assert world.scheduler.snapshot().num_preemptions > 0
    assert list(world.ends) == list("abcd")
    world.check_ends()


def test_an_expired_request_ends_with_deadline_whether_it_waits_or_runs(toy) -> None:
    world = toy.World(settings=SchedulerSettings(max_num_seqs=1))
    world.add("a", [1], deadline=5.0)
    world.add("b", [1], deadline=3.0)
    world.step()
    assert world.scheduler.next_wakeup(world.now) == 1.0
    world.start()
    assert world.scheduler.next_wakeup(world.now) == 3.0
    world.now = 3.0
    assert [commit.request_id for commit in world.take(world.scheduler.expire(3.0))] == ["b"]
    world.now = 5.0
    assert [commit.request_id for commit in world.take(world.scheduler.expire(5.0))] == ["a"]
    assert world.finish() == []
    assert {commit.finish.reason for commit in world.ends.values()} == {FinishReason.DEADLINE}
    world.check_ends()


def test_a_request_without_finite_logits_fails_alone(toy) -> None:
    world = toy.World()
    world.add("a", [1], max_tokens=4)
    world.add("b", [2], max_tokens=4)
    world.start()
    good, bad = world.pending.sequences
    failed = SequenceResult(bad.seq_id, bad.generation, error=SequenceError.INVALID_LOGITS, error_message="row 0: NaN")
    world.pending = dataclasses.replace(world.pending, sequences=(good, failed))
    world.finish()
    assert world.ends["b"].finish.reason is FinishReason.ERROR
    assert world.ends["b"].finish.error_message == "row 0: NaN"
    world.run_to_end()
    world.check_ends()


@pytest.mark.parametrize("fault", ["missing", "twice", "generation", "accepted", "other", "vocabulary", "rank"])
def test_an_answer_that_contradicts_its_plan_stops_the_group_and_changes_nothing(toy, fault: str) -> None:
    world = toy.World()
    draft = world.join("d")
    world.add("r", [1, 2, 3], max_tokens=9)
    world.step()
    session_id, text = next(iter(draft.texts.items()))
    assert world.scheduler.draft_proposed("d", session_id, draft.propose(text, 2), world.now) is None
    world.start()
    good: StepResult = world.pending
    one = good.sequences[0]
    assert one.num_accepted == 2
    bad = {
        "missing": (),
        "twice": (one, one),
        "generation": (dataclasses.replace(one, generation=7),),
        "accepted": (dataclasses.replace(one, num_accepted=3),),
        "other": (dataclasses.replace(one, committed=(one.committed[0] ^ 1, *one.committed[1:])),),
        "vocabulary": (dataclasses.replace(one, committed=(*one.committed[:-1], 99)),),
        "rank": good.sequences,
    }[fault]
    ranks = tuple(dataclasses.replace(rank, committed_checksum=1) for rank in good.ranks if fault == "rank")
    with pytest.raises(GroupError):
        world.scheduler.complete(dataclasses.replace(good, sequences=bad, ranks=ranks or good.ranks), world.now)
    assert len(world.texts["r"]) == 1
    world.scheduler.check_integrity()
    # The group is rebuilt and the request goes on from its committed tokens.
    world.group = toy.ToyGroup(world.info)
    assert world.scheduler.reset(2, world.info) == []
    assert world.scheduler.complete(good, world.now) == []
    world.run_to_end()
    world.check_ends()


def test_a_rebuilt_group_without_room_ends_the_request_with_an_error(toy) -> None:
    world = toy.World()
    world.add("a", [1] * 10, max_tokens=20)
    world.add("b", [1], max_tokens=3)
    world.step()
    smaller = toy.group_info(num_blocks=5)
    world.group = toy.ToyGroup(smaller)
    ends = world.take(world.scheduler.reset(2, smaller))
    assert [(end.request_id, end.finish.reason) for end in ends] == [("a", FinishReason.ERROR)]
    world.run_to_end()
    world.check_ends()


def test_after_a_rebuild_requests_go_on_in_their_order(toy) -> None:
    world = toy.World()
    for first in (1, 2, 3):
        world.add(str(first), [first, 9], max_tokens=9)
    world.step()
    world.add("4", [4, 9], max_tokens=9)
    world.group = toy.ToyGroup(world.info)
    world.scheduler.reset(2, world.info)
    assert [sequence.tokens[0] for sequence in world.step().sequences] == [1, 2, 3, 4]
    world.run_to_end()
    world.check_ends()


def test_draft_sessions_survive_a_rebuilt_group(toy) -> None:
    world = toy.World()
    draft = world.join("d")
    world.add("r", [1, 2], max_tokens=9)
    world.step()
    session_id, text = next(iter(draft.texts.items()))
    world.group = toy.ToyGroup(world.info)
    world.scheduler.reset(2, world.info)
    assert world.scheduler.draft_proposed("d", session_id, draft.propose(text, 4), world.now) is None
    world.step()
    assert draft.texts[session_id] == [1, 2, *world.texts["r"]]
    assert len(world.texts["r"]) == 1 + 5  # the proposal was verified behind the recomputed prompt
    world.run_to_end()
    world.check_ends()


def test_settings_apply_to_requests_added_from_then_on(toy) -> None:
    world = toy.World()
    draft = world.join("d")
    world.add("a", [1], max_tokens=9)
    world.step()
    assert list(draft.asked.values()) == [4]
    world.scheduler.update_settings(SchedulerSettings(num_speculative_tokens=0))
    world.add("b", [1], max_tokens=9)
    world.step()
    assert list(draft.asked.values()) == [4]  # one session still: the second request wants none

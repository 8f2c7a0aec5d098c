"""Requests that the group does not survive, and those that happened to be there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.core.sampling import Sampling
from outrider.router.requests import FinishReason
from outrider.router.settings import SchedulerSettings


def fail(toy, world) -> None:
    """The group dies in the step that runs, and is rebuilt."""
    world.pending = None
    world.group = toy.ToyGroup(world.info)
    world.take(world.scheduler.reset(world.scheduler.epoch + 1, world.info))
    world.scheduler.check_integrity()


def run(toy, world, kills: Callable[[str, int], bool], most: int = 400) -> list[list[str]]:
    """Run to the end; who ran in each step that the group did not survive.

    ``kills`` says whether a request kills it when its text, prompt included, has a length.
    """
    fatal = []
    for _ in range(most):
        wakeup = world.scheduler.next_wakeup(world.now)
        if wakeup is None:
            break
        requests = {r.seq_id: r for r in world.scheduler._requests}
        plan = world.start()
        if plan is None:
            world.now = max(world.now, wakeup)
            continue
        requests |= {r.seq_id: r for r in world.scheduler._requests}
        names = [requests[sequence.seq_id].new.request_id for sequence in plan.sequences]
        world.now += 1.0
        if any(kills(r.new.request_id, len(r.text)) for r in (requests[s.seq_id] for s in plan.sequences)):
            fatal.append(names)
            fail(toy, world)
        else:
            world.finish()
            world.scheduler.check_integrity()
    assert world.scheduler.next_wakeup(world.now) is None, "not done"
    return fatal


@pytest.mark.parametrize("at", [0, 6, 11])
def test_a_request_that_kills_the_group_ends_and_the_others_go_on(toy, at: int) -> None:
    """While its prompt is computed, at its first token, later."""
    world = toy.World()
    for request_id in ("a", "bad", "c"):
        world.add(request_id, [len(request_id), 1, 2, 3, 4], max_tokens=12)
    fatal = run(toy, world, lambda request_id, length: request_id == "bad" and length >= at)
    assert fatal == [["a", "bad", "c"], ["a", "bad", "c"], ["bad"]]
    end = world.ends["bad"].finish
    assert end.reason is FinishReason.ERROR
    assert "failed 3 times" in end.error_message
    assert [world.ends[name].finish.reason for name in "ac"] == [FinishReason.LENGTH] * 2
    world.check_ends()


def test_two_of_them(toy) -> None:
    world = toy.World()
    for request_id in ("bad1", "b", "bad2"):
        world.add(request_id, [len(request_id), 1, 2], max_tokens=6)
    fatal = run(toy, world, lambda request_id, _: request_id.startswith("bad"))
    assert fatal[2:] == [["bad1"], ["bad2"]]
    assert world.ends["b"].finish.reason is FinishReason.LENGTH
    world.check_ends()


def test_who_happened_to_be_there_runs_alone_for_a_token_and_then_beside_others(toy) -> None:
    world = toy.World()
    for request_id in "abc":
        world.add(request_id, [ord(request_id) % 23, 1, 2], max_tokens=8)
    for _ in range(2):
        world.step()
        world.start()
        fail(toy, world)
    assert [len(world.step().sequences) for _ in range(4)] == [1, 1, 1, 3]
    world.run_to_end()
    assert all(end.finish.reason is FinishReason.LENGTH for end in world.ends.values())
    world.check_ends()


def test_a_group_that_fails_now_and_then_ends_nobody_who_gets_on(toy) -> None:
    world = toy.World()
    world.add("a", [1, 2, 3], max_tokens=20)
    for _ in range(8):
        world.step()
        world.start()
        fail(toy, world)
    world.run_to_end()
    assert world.ends["a"].finish.reason is FinishReason.LENGTH
    world.check_ends()


@pytest.mark.parametrize("num_blocks", [8, 12])
def test_where_memory_is_short_and_many_wait(toy, num_blocks: int) -> None:
    info = toy.group_info(num_blocks=num_blocks, max_num_batched_tokens=9)
    world = toy.World(info, SchedulerSettings(max_num_seqs=3))
    for index in range(8):
        bad = index in (1, 4)
        name = f"bad{index}" if bad else f"r{index}"
        world.add(name, [index, *range(10)], max_tokens=9)
    run(toy, world, lambda request_id, length: request_id.startswith("bad") and length > 13)
    for name, end in world.ends.items():
        assert end.finish.reason is (FinishReason.ERROR if name.startswith("bad") else FinishReason.LENGTH)
    assert len(world.ends) == 8
    world.check_ends()


def test_choices_of_a_request_are_judged_one_by_one(toy) -> None:
    """All are suspected, none is guilty: the fault was elsewhere."""
    world = toy.World()
    world.add("r", list(range(9)), num_choices=3, max_tokens=5, sampling=Sampling(seed=4))
    for _ in range(2):
        world.step()
        world.step()
        world.start()
        fail(toy, world)
    world.run_to_end()
    assert all(end.finish.reason is FinishReason.LENGTH for end in world.ends.values())
    world.check_ends()

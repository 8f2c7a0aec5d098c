"""The next step is planned while one runs, where that is sound, and changes no text."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.plan import SequenceError
from outrider.core.sampling import Sampling, Verifier
from outrider.router.requests import FinishReason
from outrider.router.settings import SchedulerSettings

GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
AHEAD = SchedulerSettings(plan_ahead=True)


def world_of(toy, settings=AHEAD, **info):
    return toy.World(toy.group_info(**info), settings)


def decoding(toy, settings=AHEAD, *, max_tokens=20, requests=("a",), **options):
    """A world in which requests decode and the time of a step is known; nothing is in flight."""
    world = world_of(toy, settings)
    for request_id in requests:
        world.add(request_id, [1, 2, ord(request_id) % 20], max_tokens=max_tokens, **options)
    while world.scheduler._pacer.step_s is None:
        world.step()
    while world.pending is not None:
        world.finish()
    return world


def ahead(world):
    """Start a step, wait until just before its end, and try to plan the next one."""
    assert world.start().after_step is None
    world.now += 1.0
    return world.start()


def test_a_decoding_request_is_planned_ahead(toy) -> None:
    world = decoding(toy)
    length = len(world.texts["a"])
    plan = ahead(world)
    (sequence,) = plan.sequences
    assert plan.after_step == plan.step - 1
    assert (sequence.kv_len, sequence.tokens, sequence.logits_rows) == (0, (), (0,))
    assert world.start() is None  # two are the most
    world.finish()
    world.finish()
    assert len(world.texts["a"]) == length + 2
    world.run_to_end()
    world.check_ends()


def test_the_plan_is_made_late_and_not_before_times_are_known(toy) -> None:
    world = world_of(toy)
    world.add("a", [1, 2, 3], max_tokens=20)
    assert world.start() is not None
    world.now += 100.0
    assert world.start() is None
    world.finish()
    world = decoding(toy)
    world.start()
    due = world.scheduler.next_wakeup(world.now)
    assert due == pytest.approx(world.now + 0.99)
    assert world.start() is None
    world.now = due
    assert world.start().after_step is not None
    assert world.scheduler.next_wakeup(world.now) is None


def test_prompts_enter_ahead_and_new_requests_begin(toy) -> None:
    world = decoding(toy)
    assert world.start().after_step is None
    world.add("b", list(range(20)) * 2, max_tokens=3)
    world.now += 1.0
    plan = world.start()
    assert [len(sequence.tokens) for sequence in plan.sequences] == [0, 16]  # b's first chunk beside a's row
    world.finish()
    world.now += 1.0
    after = world.start()
    assert after.after_step == plan.step
    assert [sequence.kv_len for sequence in after.sequences] == [0, 0]
    assert after.sequences[1].tokens == tuple((list(range(20)) * 2)[16:][: len(after.sequences[1].tokens)])
    world.run_to_end()
    world.check_ends()


def test_what_is_drafted_for_is_not_planned_ahead(toy) -> None:
    world = decoding(toy)
    world.join("x")
    assert ahead(world) is None
    lookup = dataclasses.replace(AHEAD, lookup_lengths=(1, 3))
    assert ahead(decoding(toy, lookup)) is None
    assert ahead(decoding(toy, lookup, num_speculative_tokens=0)).after_step is not None
    world = decoding(toy, num_speculative_tokens=0)
    world.join("x")
    assert ahead(world).after_step is not None


def test_what_may_wait_for_a_grammar_or_is_scored_is_not_planned_ahead(toy) -> None:
    grammar = dataclasses.replace(GREEDY, grammar=Grammar(GrammarKind.REGEX, "x*"))
    assert ahead(decoding(toy, sampling=grammar)) is None
    world = decoding(toy)
    assert world.start() is not None
    world.add("b", [3] * 12, max_tokens=2, sampling=dataclasses.replace(GREEDY, prompt_logprobs=0))
    world.now += 1.0
    assert world.start() is None
    world.run_to_end()
    world.check_ends()


def test_it_is_off_unless_set(toy) -> None:
    assert ahead(decoding(toy, SchedulerSettings())) is None


def test_the_length_that_ends_a_text_is_foreseen(toy) -> None:
    world = decoding(toy, max_tokens=4)
    while len(world.texts["a"]) < 3:
        world.start()
        world.finish()
    assert ahead(world) is None
    world.finish()
    assert world.ends["a"].finish.reason is FinishReason.LENGTH
    world.check_ends()


def test_a_text_that_ended_has_run_a_row_for_nothing(toy) -> None:
    """Its blocks are free once the second step is over, not before."""
    world = world_of(toy)
    first = toy.continuation([1, 2, 17], 6)
    world.add("a", [1, 2, 17], max_tokens=20, eos_token_ids=frozenset([first[4]]))
    world.add("b", [1, 2, 18], max_tokens=20)
    while "a" not in world.ends:
        world.start()
        world.now += 1.0
        world.start()
        world.finish()
        world.scheduler.check_integrity()
    assert world.pending is not None
    assert len(world.pending.sequences) == 2
    held = world.scheduler.snapshot().num_free_blocks
    world.finish()
    world.scheduler.check_integrity()
    assert world.scheduler.snapshot().num_free_blocks > held
    world.run_to_end()
    world.check_ends()


@pytest.mark.parametrize("num_done", [0, 1])
def test_an_abort_waits_for_both_steps(toy, num_done) -> None:
    world = decoding(toy, requests=("a", "b"))
    assert ahead(world) is not None
    for _ in range(num_done):
        world.finish()
    before = world.scheduler.snapshot().num_free_blocks
    world.take(world.scheduler.abort("a", "no longer wanted", world.now))
    while world.pending is not None:
        assert world.scheduler.snapshot().num_free_blocks == before
        world.scheduler.check_integrity()
        world.finish()
    assert world.scheduler.snapshot().num_free_blocks > before
    world.run_to_end()
    world.check_ends()


def test_an_error_leaves_the_second_step_undecided(toy) -> None:
    world = decoding(toy, requests=("a", "b"))
    world.start()
    good, bad = world.pending.sequences
    bad = dataclasses.replace(bad, committed=(), error=SequenceError.INVALID_LOGITS, error_message="NaN")
    world.pending = dataclasses.replace(world.pending, sequences=(good, bad))
    plan, _ = world.group.last
    world.group.last = (plan, (good, bad))
    world.now += 1.0
    assert len(world.start().sequences) == 2
    assert [outcome.error for outcome in world.results[1].sequences] == [None, SequenceError.UNDECIDED]
    world.finish()
    assert world.ends["b"].finish.reason is FinishReason.ERROR
    world.finish()
    world.scheduler.check_integrity()
    world.run_to_end()
    world.check_ends()


def test_a_group_that_fails_with_two_steps_in_flight_starts_over(toy) -> None:
    world = decoding(toy, requests=("a", "b"))
    assert ahead(world) is not None
    world.pending = None
    world.group = toy.ToyGroup(world.info)
    assert world.take(world.scheduler.reset(2, world.info)) == []
    world.run_to_end()
    world.check_ends()


def test_a_suspect_runs_alone_and_not_ahead(toy) -> None:
    world = decoding(toy)
    for epoch in (2, 3):
        world.start()
        world.pending = None
        world.group = toy.ToyGroup(world.info)
        assert world.take(world.scheduler.reset(epoch, world.info)) == []
    assert ahead(world) is None
    world.finish()
    world.run_to_end()
    world.check_ends()


@given(
    prompts=st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=30), min_size=1, max_size=6),
    max_tokens=st.integers(1, 25),
    eos=st.frozensets(st.integers(0, 22), max_size=2),
    num_blocks=st.sampled_from([16, 24, 64]),
)
def test_texts_are_those_of_plain_decoding(toy, prompts, max_tokens, eos, num_blocks) -> None:
    """However little memory there is, and whatever ends in between."""
    world = world_of(toy, num_blocks=num_blocks, max_num_batched_tokens=24)
    for number, prompt in enumerate(prompts):
        world.add(str(number), prompt, max_tokens=max_tokens, eos_token_ids=eos)
    world.run_to_end()
    world.check_ends()

"""Several choices of one request: they share the prompt's blocks, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.core.errors import Conflict, InvalidRequest, Overloaded
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.plan import SequenceError, SequenceResult
from outrider.core.sampling import Sampling
from outrider.router.requests import FinishReason
from outrider.router.settings import SchedulerSettings

SAMPLING = Sampling(seed=5)
PROMPT = list(range(17))  # four full blocks of four, and a token that every choice computes for itself


def used_blocks(world) -> int:
    snapshot = world.scheduler.snapshot()
    return snapshot.num_blocks - snapshot.num_free_blocks


def text_rows(plan) -> list[int]:
    return [len(sequence.tokens) - sequence.num_proposal_tokens for sequence in plan.sequences]


def test_the_prompts_full_blocks_are_shared_and_computed_once(toy) -> None:
    world = toy.World()
    world.add("r", PROMPT, num_choices=4, max_tokens=6, sampling=SAMPLING)
    assert text_rows(world.step()) == [17]
    assert used_blocks(world) == 5
    plan = world.step()
    assert text_rows(plan) == [1, 1, 1, 1]
    assert [sequence.kv_len for sequence in plan.sequences] == [17, 16, 16, 16]
    assert [sequence.sampling.choice for sequence in plan.sequences[1:]] == [1, 2, 3]
    assert len({sequence.block_append[:4] for sequence in plan.sequences[1:]}) == 1
    assert used_blocks(world) == 4 + 4  # the shared ones, and one for each choice
    assert world.group.num_shared_positions == 3 * 16
    world.run_to_end()
    texts = [tuple(world.texts[name]) for name in ("r", "r/1", "r/2", "r/3")]
    assert len(set(texts)) == 4
    world.check_ends()


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_prompt_without_a_full_block_to_share_is_not_waited_for(toy, length: int) -> None:
    world = toy.World()
    world.add("r", PROMPT[:length], num_choices=3, max_tokens=2, sampling=SAMPLING)
    assert text_rows(world.step()) == [length] * 3
    world.run_to_end()
    assert world.group.num_shared_positions == 0
    world.check_ends()


def test_tokens_of_a_shared_prefix_travel_where_they_are_looked_at(toy) -> None:
    """``ToyGroup`` compares them with what the cache holds."""
    world = toy.World()
    grammar = Grammar(GrammarKind.REGEX, "x*")
    world.add("r", PROMPT, num_choices=2, max_tokens=3, sampling=dataclasses.replace(SAMPLING, grammar=grammar))
    world.step()
    assert world.step().sequences[1].prefix_tokens == tuple(PROMPT[:16])
    world.run_to_end()
    world.check_ends()


def test_choices_that_end_at_once_leave_the_prompt_to_the_others(toy) -> None:
    world = toy.World(settings=SchedulerSettings(max_num_seqs=2))
    world.add("r", PROMPT, num_choices=5, max_tokens=1, sampling=SAMPLING)
    rows = []
    while world.scheduler.snapshot().num_waiting or world.scheduler.snapshot().num_running:
        rows.append(text_rows(world.step()))
    assert rows == [[17], [1, 1], [1, 1]]
    assert world.group.num_shared_positions == 4 * 16
    assert all(end.finish.reason is FinishReason.LENGTH for end in world.ends.values())
    assert len(world.ends) == 5
    world.check_ends()


def test_others_go_ahead_of_choices_that_wait_for_their_prompt(toy) -> None:
    world = toy.World(toy.group_info(max_num_batched_tokens=12))
    world.add("r", PROMPT, num_choices=2, max_tokens=2, sampling=SAMPLING)
    world.add("x", [1, 2], max_tokens=1)
    assert text_rows(world.step()) == [12]
    assert text_rows(world.step()) == [5, 2]
    assert text_rows(world.step()) == [1, 1]
    world.run_to_end()
    world.check_ends()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_choice_that_is_aborted_takes_nothing_from_the_others(toy, steps: int) -> None:
    """Before, while and after it computes the prompt that the others wait for."""
    world = toy.World(toy.group_info(max_num_batched_tokens=10))
    world.add("r", PROMPT, num_choices=3, max_tokens=4, sampling=SAMPLING)
    for _ in range(steps):
        world.step()
    world.start()
    (end,) = world.take(world.scheduler.abort("r", "one is enough", world.now, 0))
    assert (end.choice, end.finish.reason) == (0, FinishReason.ABORT)
    world.scheduler.check_integrity()
    with pytest.raises(Conflict):
        world.add("r", [1])
    world.finish()
    world.run_to_end()
    assert [world.ends[name].finish.reason for name in ("r/1", "r/2")] == [FinishReason.LENGTH] * 2
    world.check_ends()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_aborting_the_request_ends_all_its_choices(toy, steps: int) -> None:
    world = toy.World(toy.group_info(max_num_batched_tokens=10), SchedulerSettings(max_num_seqs=2))
    world.add("r", PROMPT, num_choices=3, max_tokens=9, sampling=SAMPLING)
    for _ in range(steps):
        world.step()
    world.start()
    ends = world.take(world.scheduler.abort("r", "nobody waits", world.now))
    assert [end.choice for end in ends] == [0, 1, 2]
    world.scheduler.check_integrity()
    world.add("r", [1, 2], generation=2, max_tokens=2)
    world.finish()
    world.run_to_end()
    world.check_ends()


def test_a_prompt_that_was_forgotten_meanwhile_is_computed_anew(toy) -> None:
    """Where memory is short others come first: what nobody holds is no reason to preempt anybody."""
    world = toy.World(toy.group_info(num_blocks=5), SchedulerSettings(max_num_seqs=2))
    world.add("x", [1, 2, 3, 4], max_tokens=13)
    world.add("r", PROMPT[:9], num_choices=3, max_tokens=1, sampling=SAMPLING)
    world.step()
    assert "r" in world.ends
    assert world.scheduler.snapshot().num_cached_blocks == 2
    world.run_to_end()
    assert len(world.ends) == 4
    world.check_ends()


@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8])
@pytest.mark.parametrize("max_tokens", [1, 3, 4])
def test_choices_come_through_any_shortage(toy, num_blocks: int, max_tokens: int) -> None:
    world = toy.World(toy.group_info(num_blocks=num_blocks), SchedulerSettings(max_num_seqs=4))
    for request_id in "abc":
        world.add(request_id, PROMPT, num_choices=3, max_tokens=max_tokens, sampling=SAMPLING)
    world.run_to_end(most=200)
    assert len(world.ends) == 9
    world.check_ends()


def test_preempted_choices_share_again(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=7), SchedulerSettings(max_num_seqs=4))
    world.add("r", PROMPT, num_choices=3, max_tokens=8, sampling=SAMPLING)
    world.run_to_end()
    assert world.scheduler.snapshot().num_preemptions > 0
    assert world.group.num_shared_positions > 2 * 16
    world.check_ends()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_choices_survive_a_rebuilt_group(toy, steps: int) -> None:
    world = toy.World(toy.group_info(max_num_batched_tokens=10), SchedulerSettings(max_num_seqs=2))
    world.add("r", PROMPT, num_choices=3, max_tokens=4, sampling=SAMPLING)
    for _ in range(steps):
        world.step()
    world.start()
    world.pending = None
    world.group = toy.ToyGroup(world.info)
    assert world.scheduler.reset(2, world.info) == []
    world.run_to_end()
    assert len(world.ends) == 3
    assert world.group.num_shared_positions > 0
    world.check_ends()


def test_a_choice_without_finite_logits_fails_alone(toy) -> None:
    world = toy.World()
    world.add("r", PROMPT, num_choices=2, max_tokens=4, sampling=SAMPLING)
    world.step()
    world.start()
    first, second = world.pending.sequences
    failed = SequenceResult(first.seq_id, first.generation, error=SequenceError.INVALID_LOGITS, error_message="NaN")
    world.pending = dataclasses.replace(world.pending, sequences=(failed, second))
    world.finish()
    assert world.ends["r"].finish.reason is FinishReason.ERROR
    world.run_to_end()
    assert world.ends["r/1"].finish.reason is FinishReason.LENGTH
    world.check_ends()


def test_each_choice_has_a_draft_session_of_its_own(toy) -> None:
    world = toy.World()
    draft = world.join("d")
    world.add("r", PROMPT, num_choices=3, max_tokens=9, sampling=SAMPLING)
    world.step()
    world.step()
    assert sorted(draft.choices.values()) == [0, 1, 2]
    for session_id, count in list(draft.asked.items()):
        proposal = draft.propose(draft.texts[session_id], count, choice=draft.choices[session_id])
        assert world.scheduler.draft_proposed("d", session_id, proposal, world.now) is None
    assert [sequence.num_proposal_tokens for sequence in world.step().sequences] == [4, 4, 4]
    world.run_to_end()
    assert all(end.finish.speculation.num_accepted_tokens == 4 for end in world.ends.values())
    world.check_ends()


def test_a_drafter_in_the_router_names_the_choice(toy) -> None:
    world = toy.World()
    world.add("r", PROMPT, num_choices=2, max_tokens=9, sampling=SAMPLING)
    world.step()
    world.step()
    proposal = toy.World().join("d").propose([*PROMPT, *world.texts["r/1"]], 3, choice=1)
    assert world.scheduler.offer("r", 1, proposal, "", world.now) == "a base that is not the committed text"
    assert world.scheduler.offer("r", 1, proposal, "", world.now, choice=1) is None
    assert world.scheduler.offer("r", 1, proposal, "", world.now, choice=2) == "no such request"
    world.run_to_end()
    assert world.ends["r/1"].finish.speculation.num_accepted_tokens == 3


def test_choices_are_taken_in_together_or_refused_together(toy) -> None:
    world = toy.World(settings=SchedulerSettings(max_queue=3, max_num_seqs=1))
    with pytest.raises(InvalidRequest, match="n is 5, but must be from 1 to 4"):
        world.add("big", [1], num_choices=5, sampling=SAMPLING)
    world.add("a", [1], max_tokens=2)
    with pytest.raises(Overloaded):
        world.add("b", [1], num_choices=4, max_tokens=2, sampling=SAMPLING)
    assert world.scheduler.snapshot().num_waiting == 1
    world.add("b", [1], num_choices=3, max_tokens=2, sampling=SAMPLING)
    assert world.scheduler.snapshot().num_waiting == 4
    world.run_to_end()
    world.check_ends()


def test_a_deadline_ends_every_choice(toy) -> None:
    world = toy.World(settings=SchedulerSettings(max_num_seqs=2))
    world.add("r", PROMPT, num_choices=3, deadline=2.5, sampling=SAMPLING)
    world.run_to_end()
    assert [end.finish.reason for end in world.ends.values()] == [FinishReason.DEADLINE] * 3
    world.check_ends()

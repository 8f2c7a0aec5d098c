"""Requests that begin alike: what was computed is found again, and only what was committed ever is (case V4)."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.sampling import Sampling, Verifier
from outrider.router.scheduler import SchedulerSettings

PROMPT = list(range(17))  # blocks of four
OFF = SchedulerSettings(enable_prefix_caching=False)


def starts(world) -> list[int]:
    """Runs a step; how many positions its sequences found or had already."""
    return [sequence.kv_len for sequence in world.step().sequences]


def test_a_second_request_takes_over_the_first_ones_prompt(toy) -> None:
    world = toy.World()
    world.add("a", PROMPT, max_tokens=3)
    world.run_to_end()
    assert world.scheduler.snapshot().num_cached_blocks == 4  # the last token's keys and values were never computed
    world.add("b", [*PROMPT[:14], 3, 3, 3, 3], max_tokens=3)
    assert starts(world) == [12]
    world.run_to_end()
    snapshot = world.scheduler.snapshot()
    assert (snapshot.prefix_cache_queries, snapshot.prefix_cache_hits) == (17 + 18, 12)
    world.check_ends()


def told(world, request_id: str) -> int:
    return world.ends[request_id].finish.cached_prompt_tokens


def test_a_request_tells_what_was_found_of_its_prompt(toy) -> None:
    world = toy.World()
    world.add("a", PROMPT, max_tokens=3)
    world.run_to_end()
    world.add("b", PROMPT[:14], max_tokens=3)
    world.add("c", PROMPT, max_tokens=3)
    world.take(world.scheduler.abort("c", "its client went", world.now))
    assert starts(world) == [12]
    world.run_to_end()
    assert [told(world, request_id) for request_id in "abc"] == [0, 12, 0]
    world.check_ends()


def test_choices_tell_what_the_first_of_them_found(toy) -> None:
    """That the others find what it computed is nothing that their client saved."""
    world = toy.World()
    for request_id, found in (("a", 0), ("b", 16)):
        world.add(request_id, PROMPT, num_choices=3, max_tokens=3)
        world.run_to_end()
        assert [told(world, name) for name in (request_id, f"{request_id}/1", f"{request_id}/2")] == [found] * 3
    world.check_ends()


def test_the_last_token_of_a_prompt_is_computed_in_any_case(toy) -> None:
    world = toy.World()
    for request_id in "ab":
        world.add(request_id, PROMPT[:16], max_tokens=1)
        world.run_to_end()
    assert world.scheduler.snapshot().prefix_cache_hits == 12
    world.check_ends()


def test_a_second_turn_takes_over_the_output_of_the_first(toy) -> None:
    world = toy.World()
    world.add("a", PROMPT[:6], max_tokens=12)
    world.run_to_end()
    world.add("b", [*PROMPT[:6], *world.texts["a"], 1, 2], max_tokens=3)
    assert starts(world) == [16]  # 17 positions were computed
    world.run_to_end()
    world.check_ends()


def test_requests_share_while_both_run(toy) -> None:
    world = toy.World()
    world.add("a", PROMPT, max_tokens=9)
    world.step()
    world.add("b", PROMPT, max_tokens=9)
    assert starts(world) == [17, 16]
    snapshot = world.scheduler.snapshot()
    assert snapshot.num_blocks - snapshot.num_free_blocks == 4 + 2
    world.run_to_end()
    world.check_ends()


@pytest.mark.parametrize("wrong_from", [0, 1, 2, 3])
def test_v4_a_block_that_held_rejected_tokens_is_not_found(toy, wrong_from: int) -> None:
    """Rejected rows fill block 1 to its end; a prompt that names just those tokens must not find them there."""
    world = toy.World()
    draft = world.join("d")
    world.add("a", PROMPT[:5], max_tokens=8)
    world.step()
    ((session_id, text),) = draft.texts.items()
    proposal = draft.propose(text, 4, wrong_from=wrong_from)
    assert world.scheduler.draft_proposed("d", session_id, proposal, world.now) is None
    assert world.step().sequences[0].num_proposal_tokens == 4  # positions 6 to 9, behind the one at 5
    rejected = [*text, *proposal.tokens]
    world.add("b", rejected, max_tokens=2, num_speculative_tokens=0)
    found = next(s.kv_len for s in world.step().sequences if s.sampling is not None)
    assert found == (8 if wrong_from >= 2 else 4)  # block 1 was full of committed tokens, or was not
    world.run_to_end()
    world.add("c", [*PROMPT[:5], *world.texts["a"][:7]], max_tokens=2, num_speculative_tokens=0)
    assert starts(world) == [8]
    world.run_to_end()
    assert world.ends["a"].finish.speculation.num_accepted_tokens == wrong_from
    world.check_ends()


def test_memory_that_nobody_holds_is_used_before_anybody_is_preempted(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=6))
    world.add("a", PROMPT[:9], max_tokens=1)
    world.run_to_end()
    world.add("b", [20, 20, 20], max_tokens=20)
    world.run_to_end()
    assert world.scheduler.snapshot().num_preemptions == 0
    world.add("c", PROMPT[:9], max_tokens=1)
    assert starts(world) == [0]
    world.run_to_end()
    world.check_ends()


def test_the_text_that_was_used_last_is_kept_longest(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=8))
    for first in (1, 2):
        world.add("x", [first] * 9, max_tokens=1)
        world.run_to_end()
    world.add("x", [1] * 9, max_tokens=1)
    assert starts(world) == [8]
    world.run_to_end()
    world.add("big", [3] * 21, max_tokens=1)  # of eight blocks, four are cached: two are needed
    world.run_to_end()
    world.add("x", [1] * 9, max_tokens=1)
    world.add("y", [2] * 9, max_tokens=1)
    assert starts(world) == [8, 0]
    world.run_to_end()
    world.check_ends()


def test_a_preempted_request_finds_its_own_blocks(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=9))
    world.add("a", PROMPT[:8], max_tokens=14)
    world.add("b", PROMPT[8:16], max_tokens=14)
    before = 0
    while not (preempted := world.scheduler.snapshot().num_preemptions):
        before = world.scheduler.snapshot().prefix_cache_hits
        world.step()
    assert before == 0
    world.run_to_end()
    assert preempted == 1
    assert world.scheduler.snapshot().prefix_cache_hits > 0
    assert told(world, "a") == told(world, "b") == 0  # nothing of their prompts was there when they came
    world.check_ends()


def test_a_rebuilt_group_knows_nothing(toy) -> None:
    world = toy.World()
    world.add("a", PROMPT, max_tokens=2)
    world.run_to_end()
    world.group = toy.ToyGroup(world.info)
    assert world.scheduler.reset(2, world.info) == []
    assert world.scheduler.snapshot().num_cached_blocks == 0
    world.add("b", PROMPT, max_tokens=2)
    assert starts(world) == [0]
    world.run_to_end()
    world.check_ends()


def test_it_can_be_turned_off_but_choices_still_share(toy) -> None:
    world = toy.World(settings=OFF)
    for request_id in "ab":
        world.add(request_id, PROMPT, max_tokens=2)
        world.run_to_end()
    assert world.group.num_shared_positions == 0
    world.add("c", PROMPT, num_choices=3, max_tokens=2, sampling=Sampling(seed=5))
    world.run_to_end()
    assert world.group.num_shared_positions == 2 * 16
    world.check_ends()


def test_prompts_that_are_scored_are_computed_whole_and_found_by_others(toy) -> None:
    scored = Sampling(temperature=0.0, verifier=Verifier.GREEDY, prompt_logprobs=1)
    world = toy.World()
    for request_id in "ab":
        world.add(request_id, PROMPT, max_tokens=2, sampling=scored)
        world.run_to_end()
    assert world.group.num_shared_positions == 0
    world.add("c", PROMPT, max_tokens=2)
    world.run_to_end()
    assert world.group.num_shared_positions == 16
    assert world.scheduler.snapshot().prefix_cache_queries == 17
    world.check_ends()


def test_tokens_that_were_found_travel_where_they_are_looked_at(toy) -> None:
    """``ToyGroup`` compares them with what the cache holds."""
    world = toy.World()
    world.add("a", PROMPT, max_tokens=2)
    world.run_to_end()
    sampling = dataclasses.replace(Sampling(seed=1), grammar=Grammar(GrammarKind.REGEX, "x*"))
    world.add("b", PROMPT, max_tokens=2, sampling=sampling)
    assert world.step().sequences[0].prefix_tokens == tuple(PROMPT[:16])
    world.run_to_end()
    world.check_ends()

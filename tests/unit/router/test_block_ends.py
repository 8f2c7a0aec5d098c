"""Where a block of tokens ends: cases E1, E2, E3, E5 and E6 of the inputs that broke other systems."""

from __future__ import annotations

import pytest

from outrider.core.errors import InvalidRequest
from outrider.core.sampling import Sampling, Verifier
from outrider.router.requests import FinishReason, NoStops
from outrider.router.rounds import cut
from outrider.router.scheduler import Scheduler
from outrider.router.settings import SchedulerSettings

PROMPT = [3, 1, 4, 1, 5]


class StopAfter:
    """A cutter that finds its stop string complete with the output token of the given index."""

    def __init__(self, index: int) -> None:
        self.left = index + 1

    def feed(self, tokens):
        kept = min(self.left, len(tokens))
        self.left -= kept
        return kept, "halt" if self.left == 0 else None


def run_speculatively(world, request_id: str = "r", k: int = 4) -> None:
    """Run to the end with a draft that is always right and on time."""
    draft = world.drafts["d"]
    for _ in range(100):
        if request_id in world.ends:
            return
        for session_id, count in list(draft.asked.items()):
            if count:
                proposal = draft.propose(draft.texts[session_id], min(count, k), rows=True)
                world.scheduler.draft_proposed("d", session_id, proposal, world.now)
        world.step()
    raise AssertionError("the request does not end")


def test_e1_eos_inside_an_accepted_block_cuts_everything(toy) -> None:
    world = toy.World()
    world.join("d")
    wanted = toy.continuation(PROMPT, 4)
    eos = wanted[3]  # first token from the prompt, then the third of an accepted block of five
    assert eos not in wanted[:3]
    world.add("r", PROMPT, eos_token_ids=frozenset([eos]))
    run_speculatively(world)
    finish = world.ends["r"].finish
    assert world.texts["r"] == wanted
    assert finish.reason is FinishReason.STOP
    assert finish.stop_token == eos
    assert finish.matched_stop is None
    assert finish.completion_tokens == 4
    stats = finish.speculation
    # The first step proposes nothing; the second accepts four and is cut after the third.
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 3, 3)
    assert stats.acceptance_histogram == (0, 0, 0, 1, 0)
    assert stats.target_calls == 2
    assert world.ends["r"].num_accepted == 3
    world.check_ends()


@pytest.mark.parametrize("index", range(8))
def test_e2_ids_end_with_the_token_that_completes_a_stop_string(toy, index: int) -> None:
    """Wherever the match lies in its round, early in a long block or across two rounds."""
    world = toy.World()
    world.scheduler = Scheduler(world.info, SchedulerSettings(), epoch=1, make_cutter=lambda new: StopAfter(index))
    world.join("d")
    world.add("r", PROMPT, stop=("halt",))
    run_speculatively(world)
    finish = world.ends["r"].finish
    assert world.texts["r"] == toy.continuation(PROMPT, index + 1)
    assert (finish.reason, finish.matched_stop, finish.stop_token) == (FinishReason.STOP, "halt", None)
    assert finish.completion_tokens == index + 1
    assert finish.speculation.num_accepted_tokens <= index


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7, 11])
def test_e3_exactly_max_tokens(toy, max_tokens: int) -> None:
    world = toy.World()
    world.join("d")
    world.add("r", PROMPT, max_tokens=max_tokens)
    produced = 0
    while "r" not in world.ends:
        draft = world.drafts["d"]
        for session_id in draft.asked:
            proposal = draft.propose(draft.texts[session_id], 4)
            world.scheduler.draft_proposed("d", session_id, proposal, world.now)
        plan = world.start()
        # Of more proposals than this not all could be accepted: the round's own token must fit behind them.
        assert plan.sequences[0].num_proposal_tokens <= max(0, max_tokens - 1 - produced)
        world.finish()
        produced = len(world.texts["r"])
    assert world.texts["r"] == toy.continuation(PROMPT, max_tokens)
    assert world.ends["r"].finish.completion_tokens == max_tokens
    assert world.ends["r"].finish.reason is FinishReason.LENGTH


def test_e5_proposals_shrink_to_the_context(toy) -> None:
    world = toy.World(toy.group_info(max_model_len=20))
    world.join("d")
    prompt = list(range(17))  # context - 3
    world.add("r", prompt, num_speculative_tokens=5)
    run_speculatively(world, k=5)
    assert world.texts["r"] == toy.continuation(prompt, 3)
    assert world.ends["r"].finish.reason is FinishReason.LENGTH
    world.check_ends()


def test_e5_max_tokens_beyond_the_context_ends_at_the_context(toy) -> None:
    world = toy.World(toy.group_info(max_model_len=20))
    world.add("r", list(range(17)), max_tokens=50)
    world.run_to_end()
    assert len(world.texts["r"]) == 3
    assert world.ends["r"].finish.reason is FinishReason.LENGTH


def test_e6_speculation_stops_where_the_drafts_context_ends(toy) -> None:
    world = toy.World()
    world.join("d", max_model_len=12)
    world.add("r", PROMPT, max_tokens=30)
    run_speculatively(world)
    assert world.texts["r"] == toy.continuation(PROMPT, 30)
    assert world.ends["r"].finish.speculation.num_accepted_tokens > 0
    assert world.drafts["d"].texts == {}


def test_e6_a_prompt_beyond_the_drafts_context_is_served_without(toy) -> None:
    world = toy.World()
    world.join("small", max_model_len=4)
    world.add("r", PROMPT, max_tokens=5)
    world.step()
    assert world.drafts["small"].texts == {}
    world.join("large")
    world.step()
    assert len(world.drafts["large"].texts) == 1
    world.run_to_end()
    world.check_ends()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": [1] * 20}, "prompt_tokens"),
        ({"prompt": [1] * 17, "info": {"num_blocks": 4}}, "prompt_tokens"),
        ({"prompt": []}, "prompt_tokens"),
        ({"prompt": [99]}, "prompt_tokens"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1] * 10, "max_tokens": 9, "info": {"num_blocks": 4}}, "max_tokens"),
        ({"prompt": [1], "num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_requests_that_can_never_run_are_refused_at_the_door(toy, changes, field) -> None:
    world = toy.World(toy.group_info(**{"max_model_len": 20, "block_size": 4, **changes.pop("info", {})}))
    with pytest.raises(InvalidRequest) as raised:
        world.add("r", changes.pop("prompt"), **changes)
    assert raised.value.field == field
    assert world.scheduler.snapshot().num_waiting == 0
    assert world.scheduler.next_wakeup(0.0) is None


def test_without_max_tokens_a_request_takes_what_the_cache_holds(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=4))
    world.add("r", PROMPT)
    world.run_to_end()
    assert len(world.texts["r"]) == 16 + 1 - len(PROMPT)  # the last token needs no place in the cache
    world.check_ends()


def test_a_prompt_of_one_token_and_a_full_cache(toy) -> None:
    world = toy.World(toy.group_info(num_blocks=1))
    world.add("r", [7])
    world.run_to_end()
    assert len(world.texts["r"]) == 4
    world.check_ends()


def test_whatever_ends_the_text_first_counts() -> None:
    def where(tokens, room, cutter=None, ends=(9,)):
        found = cut(tokens, room, frozenset(ends), cutter or NoStops())
        return found.num_kept, found.reason, found.matched_stop, found.stop_token

    assert where((1, 2, 3), 5) == (3, None, None, None)
    assert where((1, 2, 3), 3) == (3, FinishReason.LENGTH, None, None)
    assert where((1, 2, 3), 2) == (2, FinishReason.LENGTH, None, None)
    assert where((1, 9, 3), 2) == (2, FinishReason.STOP, None, 9)
    assert where((1, 2, 9), 2) == (2, FinishReason.LENGTH, None, None)
    assert where((1, 9, 3), 5, StopAfter(0)) == (1, FinishReason.STOP, "halt", None)
    assert where((1, 9, 3), 5, StopAfter(1)) == (2, FinishReason.STOP, None, 9)
    assert where((1, 2, 3), 2, StopAfter(1)) == (2, FinishReason.STOP, "halt", None)
    assert where((9,), 5, StopAfter(0)) == (1, FinishReason.STOP, None, 9)


def test_bytes_of_probabilities_are_counted_under_rejection_only(toy) -> None:
    for verifier, temperature in ((Verifier.GREEDY, 0.0), (Verifier.COUPLED, 1.0), (Verifier.REJECTION, 1.0)):
        world = toy.World()
        world.join("d")
        world.add("r", PROMPT, max_tokens=6, sampling=Sampling(temperature=temperature, verifier=verifier))
        run_speculatively(world)
        finish = world.ends["r"].finish
        assert finish.speculation.probability_bytes == (8 * 4 if verifier is Verifier.REJECTION else 0)
        assert finish.speculation.verifier is verifier
        assert finish.speculation.drafter == "model"
        assert finish.reproducible == (verifier is not Verifier.REJECTION)

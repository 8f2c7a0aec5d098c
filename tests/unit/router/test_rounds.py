"""Which proposals may be verified, and by how much of them."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.core.plan import SequenceResult
from outrider.core.prefix import HashedTokens
from outrider.core.sampling import Sampling, Verifier
from outrider.router.requests import SpeculationStats
from outrider.router.rounds import counted, refusal


def begin(toy, **info):
    world = toy.World(toy.group_info(**info))
    draft = world.join("d")
    return world, draft


def offer(world, draft, proposal) -> str | None:
    session_id = next(iter(draft.texts))
    return world.scheduler.draft_proposed("d", session_id, proposal, world.now)


def test_refusals_say_why(toy) -> None:
    draft = toy.World().join("d")
    prefix = [1, 2, 3]
    text = HashedTokens([*prefix, *toy.continuation(prefix, 2)])
    vocab_size = toy.vocab_size
    good = draft.propose(text.tokens, 3)
    assert refusal(good, text, vocab_size) is None
    assert refusal(draft.propose(prefix, 3), text, vocab_size) is None  # late by two tokens, both right
    assert refusal(draft.propose(prefix, 2), text, vocab_size) == "too late: all its tokens are decided"
    assert refusal(draft.propose(prefix, 1), text, vocab_size) == "too late: all its tokens are decided"
    assert refusal(draft.propose(prefix, 3, wrong_from=1), text, vocab_size) == "too late: other tokens were committed"
    assert refusal(draft.propose([1, 2, 4], 5), text, vocab_size) == "a base that is not the committed text"
    ahead = draft.propose([*text.tokens, 5], 3)
    assert refusal(ahead, text, vocab_size) == "a base that is not the committed text"
    assert refusal(dataclasses.replace(good, tokens=()), text, vocab_size) == "no tokens"
    tree = dataclasses.replace(good, parents=(-1, -1, 0))
    assert refusal(tree, text, vocab_size) == "a tree: only chains are verified"
    assert refusal(dataclasses.replace(good, tokens=(1, 2, 23)), text, vocab_size).startswith("a token outside")


def test_only_the_rest_of_a_late_proposal_is_verified(toy) -> None:
    world, draft = begin(toy)
    world.add("r", [1, 2, 3], max_tokens=20)
    world.step()
    early = draft.propose(draft.texts[1], 4)
    world.step()
    assert offer(world, draft, early) is None
    plan = world.step()
    assert plan.sequences[0].num_proposal_tokens == 3
    assert world.ends == {}
    assert len(world.texts["r"]) == 1 + 1 + 4


def test_the_newest_base_wins_and_a_tail_is_used_later(toy) -> None:
    world, draft = begin(toy)
    world.add("r", [1, 2, 3], max_tokens=30, num_speculative_tokens=2)
    world.step()
    old_prefix = list(draft.texts[1])
    world.step()
    assert offer(world, draft, draft.propose(draft.texts[1], 6)) is None
    assert offer(world, draft, draft.propose(old_prefix, 6)) == "older than the one at hand"
    # Six tokens: two are verified, the third is the round's own, and the rest still continues the text.
    assert world.step().sequences[0].num_proposal_tokens == 2
    assert world.step().sequences[0].num_proposal_tokens == 2
    assert world.step().sequences[0].num_proposal_tokens == 0


def test_a_rejected_proposals_suffix_is_not_kept(toy) -> None:
    world, draft = begin(toy)
    world.add("r", [1, 2, 3], max_tokens=30)
    world.step()
    assert offer(world, draft, draft.propose(draft.texts[1], 4, wrong_from=1)) is None
    assert world.step().sequences[0].num_proposal_tokens == 4
    assert world.step().sequences[0].num_proposal_tokens == 0


def test_a_request_without_speculation_asks_no_draft(toy) -> None:
    world, draft = begin(toy)
    world.add("r", [1], max_tokens=9, num_speculative_tokens=0)
    world.step()
    assert draft.texts == {}
    assert world.scheduler.offer("r", 1, draft.propose([1], 2), "ngram", world.now) == "speculation is off"


def test_a_drafter_in_the_router_needs_no_session(toy) -> None:
    world = toy.World()
    world.add("r", [1], max_tokens=9)
    world.step()
    helper = toy.World().join("d")
    proposal = dataclasses.replace(helper.propose([1, *world.texts["r"]], 4), drafter="ngram")
    assert world.scheduler.offer("r", 1, proposal, "", world.now) is None
    world.step()
    world.run_to_end()
    assert world.ends["r"].finish.speculation.drafter == "ngram"
    assert world.ends["r"].finish.speculation.num_accepted_tokens == 4


@pytest.mark.parametrize("wrong", [None, 0])
def test_how_much_is_offered_depends_on_lengths_alone(toy, wrong: int | None) -> None:
    """Rule 6: budget, context and max_tokens shorten a drawn block, whatever its tokens are."""
    world, draft = begin(toy, max_num_batched_tokens=4)
    sampling = Sampling(verifier=Verifier.REJECTION)
    world.add("r", [1, 2], max_tokens=30, num_speculative_tokens=8, sampling=sampling)
    world.step()
    assert offer(world, draft, draft.propose(draft.texts[1], 8, wrong_from=wrong, rows=True)) is None
    plan = world.step()
    assert plan.sequences[0].num_proposal_tokens == 3
    assert len(plan.sequences[0].draft_rows) == 3


def test_tokens_before_a_broken_row_are_verified(toy) -> None:
    """Case S9, and rule 6: the row is broken because of them or not; they are offered all the same."""
    world, draft = begin(toy)
    world.add("r", [1, 2], max_tokens=30, sampling=Sampling(verifier=Verifier.REJECTION))
    world.step()
    whole = draft.propose(draft.texts[1], 4, rows=True)
    nan = dataclasses.replace(whole.rows[2], probs=whole.rows[2].probs * float("nan"))
    assert offer(world, draft, dataclasses.replace(whole, rows=(*whole.rows[:2], nan, whole.rows[3]))) is None
    plan = world.step()
    assert plan.sequences[0].num_proposal_tokens == 2
    assert len(plan.sequences[0].draft_rows) == 2
    assert offer(world, draft, dataclasses.replace(whole, rows=(nan, *whole.rows[1:]))) == (
        "a row that is not a distribution"
    )


def test_a_budget_is_shared_evenly_among_proposals(toy) -> None:
    world = toy.World(toy.group_info(max_num_batched_tokens=12))
    draft = world.join("d")
    for request_id in "abcd":
        world.add(request_id, [ord(request_id) % 20], max_tokens=30)
    world.step()
    for session_id, text in draft.texts.items():
        world.scheduler.draft_proposed("d", session_id, draft.propose(text, 4), world.now)
    assert [sequence.num_proposal_tokens for sequence in world.step().sequences] == [2, 2, 2, 2]


def test_nothing_behind_the_end_is_counted(toy) -> None:
    proposal = toy.World().join("d").propose([1], 4)
    stats = SpeculationStats(Verifier.GREEDY, acceptance_histogram=(0,) * 5)

    def count(proposal, num_accepted, num_kept, **forced):
        result = SequenceResult(1, 1, num_accepted, (0,) * (num_accepted + 1), grammar_us=1500, **forced)
        return counted(stats, proposal, result, num_kept)

    whole = count(proposal, 2, 3, num_forced_tokens=2, num_forced_accepted=1)
    assert (whole.num_draft_tokens, whole.num_accepted_tokens, whole.acceptance_histogram) == (4, 2, (0, 0, 1, 0, 0))
    assert (whole.num_forced_tokens, whole.num_forced_accepted, whole.grammar_ms) == (2, 1, 1.5)
    cut = count(proposal, 4, 3, num_forced_tokens=3, num_forced_accepted=2)
    assert (cut.num_draft_tokens, cut.num_accepted_tokens) == (3, 3)
    assert (cut.num_forced_tokens, cut.num_forced_accepted) == (2, 2)
    short = count(proposal, 4, 1, num_forced_tokens=4, num_forced_accepted=4)
    assert (short.num_draft_tokens, short.num_accepted_tokens, short.acceptance_histogram) == (1, 1, (0, 1, 0, 0, 0))
    assert (short.num_forced_tokens, short.num_forced_accepted) == (1, 1)
    plain = count(None, 0, 1)
    assert (plain.target_calls, plain.num_spec_steps, plain.grammar_ms) == (1, 0, 1.5)


def test_hopeless_speculation_stops_and_is_tried_again(toy) -> None:
    """Rule 8. The draft keeps up meanwhile: it is told every commit and asked for nothing."""
    world = toy.World(toy.group_info(max_model_len=600, num_blocks=200))
    draft = world.join("d", max_model_len=600)
    world.add("r", [1], max_tokens=300)
    asked = []
    while "r" not in world.ends:
        for session_id, count in list(draft.asked.items()):
            asked.append(count)
            if count:
                proposal = draft.propose(draft.texts[session_id], count, wrong_from=0)
                world.scheduler.draft_proposed("d", session_id, proposal, world.now)
        world.step()
    first_pause = asked.index(0)
    assert 20 < first_pause < 40
    assert any(asked[first_pause:])
    assert asked.count(0) > 200
    world.check_ends()

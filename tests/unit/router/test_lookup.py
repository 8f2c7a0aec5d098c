"""n-gram lookup: what is proposed, when it is heard, and what is learned from it."""

from __future__ import annotations

import dataclasses
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.prefix import HashedTokens
from outrider.core.sampling import Sampling, Verifier
from outrider.router.hearing import usable
from outrider.router.lookup import Lookup, Match, NgramIndex, continuation
from outrider.router.policy import Throttle
from outrider.router.settings import SchedulerSettings

LOOKUP = SchedulerSettings(lookup_lengths=(2, 3))
PERIOD = 5


def longest_match(tokens: list[int], shortest: int, longest: int) -> Match | None:
    """By trying every place."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return Match(length, end)
    return None


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_the_longest_match_is_found_where_it_was_last(tokens, shortest, more, chance) -> None:
    index, read = NgramIndex(shortest, shortest + more), 0
    while read < len(tokens):
        read += chance.randint(1, 7)  # a round's tokens
        text = tokens[:read]
        while not index.read(text, most=3):
            pass
        assert index.match(text) == longest_match(text, shortest, shortest + more)


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    """Counted in entries and keys, not in time."""
    chance = random.Random(1)
    text: list[int] = []
    index = NgramIndex(2, 4)
    entered = []
    keys = 0
    original = index._keys

    def counted(tokens, end):
        nonlocal keys
        for item in original(tokens, end):
            keys += 1
            yield item

    index._keys = counted
    for _ in range(2000):
        text.append(chance.randrange(3))  # the same few n-grams over and over
        keys = 0
        index.read(text)
        index.match(text)
        entered.append(keys)
    assert max(entered) <= 6  # three lengths to enter, three to look up
    assert len(index._ends) <= 3**2 + 3**3 + 3**4


def test_a_long_prompt_is_read_in_parts() -> None:
    lookup, text = Lookup(2, 2), HashedTokens([7, 8] * 5000)
    assert lookup.match(text) is None
    assert lookup.match(text) is None
    assert lookup.match(text) == Match(2, 9998)


@pytest.mark.parametrize(
    ("tokens", "end", "expected"),
    [([1, 2, 3, 1, 2], 2, (3, 1, 2, 3)), ([4, 4, 4], 2, (4, 4, 4, 4)), ([1, 2, 9, 8, 7, 1, 2], 2, (9, 8, 7, 1))],
)
def test_what_followed_is_proposed(tokens, end, expected) -> None:
    assert continuation(tokens, end, 4) == expected
    proposal = Lookup(1, 2).proposal(HashedTokens(tokens), 4)
    assert proposal is not None
    assert (proposal.tokens, proposal.rows, proposal.drafter) == (expected, (), "ngram")
    assert (proposal.base_len, proposal.base_hash) == (len(tokens), HashedTokens(tokens).hashes[-1])


def test_nothing_is_proposed_without_a_match() -> None:
    assert Lookup(2, 3).proposal(HashedTokens([1, 2, 3, 1]), 4) is None
    assert Lookup(1, 3).proposal(HashedTokens([1]), 4) is None


@pytest.mark.parametrize("lengths", [(0, 2), (3, 2)])
def test_lengths_that_make_no_sense(lengths) -> None:
    with pytest.raises(ValueError, match="cannot be looked up"):
        NgramIndex(*lengths)


@pytest.fixture
def copying(toy, monkeypatch):
    """The toy repeats what it said ``PERIOD`` tokens ago, and now and then says something else."""

    def next_token(prefix, choice=0):
        slip = len(prefix) % 17 == 0
        return (prefix[-PERIOD] + slip + choice) % toy.vocab_size if len(prefix) >= PERIOD else len(prefix)

    monkeypatch.setattr(sys.modules[toy.World.__module__], "next_token", next_token)
    return toy


PROMPT = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("verifier", [Verifier.GREEDY, Verifier.COUPLED, Verifier.REJECTION])
def test_alone_it_proposes_without_any_draft_worker(copying, verifier) -> None:
    world = copying.World(settings=LOOKUP)
    sampling = Sampling(temperature=0.0 if verifier is Verifier.GREEDY else 1.0, verifier=verifier)
    world.add("r", PROMPT, max_tokens=40, sampling=sampling)
    steps = []
    while "r" not in world.ends:
        steps.append(world.step())
    assert all(sequence.draft_rows == () for plan in steps for sequence in plan.sequences)
    stats = world.ends["r"].finish.speculation
    assert stats.drafter == "ngram"
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.target_calls < 25
    snapshot = world.scheduler.snapshot()
    assert (snapshot.num_lookup_tokens, snapshot.num_lookup_accepted) == (
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
    )
    world.check_ends()


def test_it_is_off_by_default_and_for_requests_without_speculation(copying) -> None:
    for world, options in (
        (copying.World(), {}),
        (copying.World(settings=LOOKUP), {"num_speculative_tokens": 0}),
    ):
        world.add("r", PROMPT, max_tokens=20, **options)
        world.run_to_end()
        assert world.ends["r"].finish.speculation.num_spec_steps == 0
        world.check_ends()


def propose(world, draft, wrong_from: int | None = None) -> None:
    """The draft worker answers what it was asked."""
    for session_id, count in draft.asked.items():
        if count:
            proposal = draft.propose(draft.texts[session_id], count, wrong_from)
            world.scheduler.draft_proposed("d", session_id, proposal, world.now)


def test_a_longest_match_is_heard_before_a_model_and_a_shorter_one_after_it(copying) -> None:
    world = copying.World(copying.group_info(max_model_len=400), SchedulerSettings(lookup_lengths=(1, 4)))
    draft = world.join("d", max_model_len=400)
    world.add("r", [9, 1, 8, 2, 7, 9], max_tokens=200)
    (request,) = world.scheduler._requests
    world.step()
    heard = set()
    while "r" not in world.ends:
        if world.num_steps % 4:
            propose(world, draft, wrong_from=0)  # so that a proposal tells who made it
        match, model = request.lookup.match(request.text), usable(request)
        tokens = continuation(request.text.tokens, match.end, 4) if match is not None else ()
        plan = world.step()
        if plan is None:  # it waits for the model
            continue
        proposed = plan.sequences[0].proposal
        if match is not None and (match.length == 4 or model is None):
            expected = tokens
        else:
            expected = model.tokens if model is not None else ()
        assert proposed == expected[: len(proposed)]
        assert bool(proposed) == bool(expected) or "r" in world.ends
        heard.add((match is not None and match.length == 4, match is not None, model is not None))
    assert heard >= {(True, True, True), (True, True, False), (False, True, True)}
    stats, snapshot = world.ends["r"].finish.speculation, world.scheduler.snapshot()
    (counts,) = snapshot.drafts
    assert stats.drafter == "model+ngram"
    assert counts.num_draft_tokens > counts.num_accepted_tokens == 0
    assert snapshot.num_lookup_accepted == stats.num_accepted_tokens > 0
    assert counts.num_draft_tokens + snapshot.num_lookup_tokens == stats.num_draft_tokens
    world.check_ends()


def test_a_model_that_is_always_wrong_does_not_silence_lookup(copying) -> None:
    world = copying.World(copying.group_info(max_model_len=400, num_blocks=200), LOOKUP)
    draft = world.join("d", max_model_len=400)
    world.add("r", list(range(10)), max_tokens=300)
    (request,) = world.scheduler._requests
    for _ in range(60):  # while nothing repeats, the model is heard
        request.lookup_throttle = dataclasses.replace(request.lookup_throttle, pause=1)
        propose(world, draft, wrong_from=0)
        world.step()
    assert not request.throttle.is_on
    request.lookup_throttle = Throttle()
    world.run_to_end()
    assert world.scheduler.snapshot().num_lookup_accepted > 100
    world.check_ends()


def test_lookup_that_is_always_wrong_does_not_silence_the_model(toy) -> None:
    """The toy's own text is noise: what followed a token before does not follow it again."""
    world = toy.World(toy.group_info(max_model_len=400, num_blocks=200), SchedulerSettings(lookup_lengths=(1, 1)))
    draft = world.join("d", max_model_len=400)
    world.add("r", [*range(23), *range(23)], max_tokens=300)
    (request,) = world.scheduler._requests
    while "r" not in world.ends and request.lookup_throttle.is_on:
        propose(world, draft)
        world.step()
    before = world.ends or request.stats.num_accepted_tokens
    assert before != world.ends, "unknown: lookup never paused"
    for _ in range(10):
        propose(world, draft)
        world.step()
    assert request.stats.num_accepted_tokens >= before + 30
    world.run_to_end()
    world.check_ends()


def test_nobody_waits_for_a_model_where_a_longest_match_speaks_anyway(copying) -> None:
    """Else the same step would be held back for the proposal that is predicted to come."""

    def first_plan(lookup: bool):
        world = copying.World(settings=SchedulerSettings(lookup_lengths=(2, 3) if lookup else None))
        draft = world.join("d")
        world.add("r", PROMPT, max_tokens=40)
        (request,) = world.scheduler._requests
        for _ in range(3):
            request.lookup = None
            world.step(10.0)
            world.now += 0.1
            propose(world, draft)
        request.proposal = None
        world.step(10.0)
        request.lookup = Lookup(2, 3) if lookup else None
        return world.start()

    assert first_plan(lookup=True).sequences[0].num_proposal_tokens > 0
    assert first_plan(lookup=False) is None

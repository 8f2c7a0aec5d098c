"""The batcher over a toy drafter whose tokens give away every stale cache entry."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from outrider.core.prefix import hash_tokens
from outrider.core.proposal import Proposal
from outrider.core.sampling import Sampling, Verifier
from outrider.workers.draft.messages import Address, CloseStream, EvictionReason, NeedTokens, Open, Refuse

Make = Callable[..., Any]
Expect = Callable[..., tuple[int, ...]]


def only_proposal(events: list[Any]) -> Proposal:
    (event,) = events
    assert isinstance(event.body, Proposal)
    return event.body


def test_open_prefills_in_chunks_and_proposes_once(make_harness: Make, expect: Expect) -> None:
    harness = make_harness(max_num_batched_tokens=16)
    prompt = [index % 7 for index in range(50)]
    harness.open(prompt, num_tokens=4)
    proposal = only_proposal(harness.settle())
    assert [sum(len(rows.tokens) for rows in batch) for batch in harness.drafter.batches] == [16, 16, 16, 2, 1, 1, 1]
    assert proposal.tokens == expect(prompt, 4)
    assert (proposal.base_len, proposal.base_hash) == (50, hash_tokens(prompt))
    assert proposal.rows == ()
    assert not harness.batcher.has_work


def test_num_tokens_zero_keeps_up_and_proposes_nothing(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    address = harness.open([1, 2, 3, 4, 5, 6], num_tokens=0)
    assert harness.settle() == []
    assert harness.batcher.sessions[address.key].kv_len == 5
    harness.commit(address, [1, 2, 3, 4, 5, 6, 1], 6, num_tokens=3)
    harness.drafter.batches.clear()
    assert only_proposal(harness.settle()).tokens == expect([1, 2, 3, 4, 5, 6, 1], 3)
    assert len(harness.drafter.batches[0][0].tokens) == 2


def test_rows_travel_with_their_tokens(make_harness: Make, expect: Expect) -> None:
    """Under rejection, also after a commit that agrees with a part of the proposal (the rows move along)."""
    harness = make_harness()
    prompt = [1, 2, 3]
    address = harness.open(prompt, num_tokens=4, verifier=Verifier.REJECTION)
    first = only_proposal(harness.settle())
    text = prompt + list(first.tokens[:2])
    harness.commit(address, text, 3)
    second = only_proposal(harness.settle())
    assert second.tokens == expect(text, 4)
    assert second.tokens[:2] == first.tokens[2:]
    for proposal in (first, second):
        for index, (token, row) in enumerate(zip(proposal.tokens, proposal.rows, strict=True)):
            assert row.token_ids[0] == token
            assert row.probs[0] == pytest.approx(1 / (2 + proposal.base_len + index))


def test_commit_that_agrees_does_not_interrupt_a_proposal(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    prompt = [1, 2, 3]
    guess = list(expect(prompt, 6))
    address = harness.open(prompt, num_tokens=4)
    harness.batcher.step()
    harness.batcher.step()  # two tokens drafted, the proposal under way
    harness.commit(address, prompt + guess[:1], 3)
    assert harness.take() == []
    harness.drafter.batches.clear()
    assert only_proposal(harness.settle()).tokens == tuple(guess[1:5])
    assert len(harness.drafter.batches) == 3  # one of the four tokens was there


def test_commit_that_disagrees_voids_a_proposal_under_way(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    prompt = [1, 2, 3]
    wrong = (expect(prompt, 1)[0] + 1) % 7
    address = harness.open(prompt, num_tokens=4)
    harness.batcher.step()
    harness.batcher.step()
    harness.commit(address, [*prompt, wrong], 3)
    proposal = only_proposal(harness.settle())
    assert (proposal.base_len, proposal.tokens) == (4, expect([*prompt, wrong], 4))


def test_more_tokens_for_the_same_text(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    address = harness.open([1, 2], num_tokens=2)
    assert only_proposal(harness.settle()).tokens == expect([1, 2], 2)
    harness.commit(address, [1, 2], 2, num_tokens=5)
    assert only_proposal(harness.settle()).tokens == expect([1, 2], 5)
    harness.commit(address, [1, 2], 2, num_tokens=1)
    assert only_proposal(harness.take()).tokens == expect([1, 2], 1)  # at once: nothing to run


def test_num_tokens_is_clipped(make_harness: Make) -> None:
    harness = make_harness(max_num_tokens=3)
    harness.open([1, 2], num_tokens=50)
    assert len(only_proposal(harness.settle()).tokens) == 3


@pytest.mark.parametrize("num_blocks", [3000, 90])
@pytest.mark.parametrize("seed", range(4))
def test_random_rounds_of_many_sessions(make_harness: Make, expect: Expect, seed: int, num_blocks: int) -> None:
    """k of 1 to 8, random rejections, late and early commits, sessions that come, go and, with few blocks, are evicted.

    Each proposal is what a decode of its base alone gives, and every cache entry that counts belongs to the text.
    """
    rng = random.Random(seed)
    harness = make_harness(
        num_blocks=num_blocks,
        max_num_batched_tokens=rng.choice([5, 16, 40]),
        max_num_seqs=rng.choice([3, 64]),
        max_model_len=2000,
    )
    texts: dict[Address, list[int]] = {}
    proposals = rejected = evicted = 0
    for _ in range(400):
        if len(texts) < 6 and rng.random() < 0.3:
            prompt = [rng.randrange(7) for _ in range(rng.randint(1, 40))]
            address = harness.open(prompt, session_id=rng.getrandbits(40), num_tokens=rng.randint(0, 8))
            texts[address] = prompt
        if texts and rng.random() < 0.03:
            address = rng.choice(list(texts))
            harness.close(address)
            del texts[address]
        for address, text in texts.items():
            if rng.random() < 0.2:
                right = rng.randint(0, 5)
                base = len(text)
                text.extend(expect(text, right))
                if rng.random() < 0.7:
                    text.extend(rng.randrange(7) for _ in range(rng.choice([1, 1, 3])))
                    rejected += 1
                harness.commit(address, text, base, num_tokens=rng.randint(1, 8))
        for _ in range(rng.randint(0, 6)):
            harness.batcher.step()
        harness.check_caches()
        for event in harness.take():
            if event.address not in texts:
                continue
            if event.body is EvictionReason.NO_MEMORY:
                evicted += 1
                del texts[event.address]
                continue
            assert isinstance(event.body, Proposal)
            base_text = texts[event.address][: event.body.base_len]
            assert event.body.base_hash == hash_tokens(base_text)
            assert event.body.tokens == expect(base_text, len(event.body.tokens))
            proposals += 1
    assert proposals > 100
    assert rejected > 100
    assert (evicted > 0) == (num_blocks < 3000)
    harness.batcher.handle(CloseStream(1))
    harness.batcher.check_integrity()
    assert harness.batcher.pool.num_free == num_blocks


def test_long_prompts_and_drafting_sessions_share_the_steps(make_harness: Make) -> None:
    """A prompt of 190 tokens beside four sessions that draft: neither waits for the other to finish."""
    harness = make_harness(max_num_batched_tokens=16, catch_up_rows=6)
    texts = {}
    for session_id in range(4):
        texts[harness.open([session_id, 1], session_id=session_id, num_tokens=4)] = [session_id, 1]
    harness.settle()
    harness.open([1] * 190, session_id=99, num_tokens=2)
    steps_until_caught_up = 0
    answered_meanwhile = 0
    while harness.batcher.sessions[(1, 99)].kv_len < 189:
        for address, text in texts.items():
            if not harness.batcher.sessions[address.key].proposal_due:
                text.append(0)
                harness.commit(address, text, len(text) - 1)
        rows = harness.batcher.step()
        steps_until_caught_up += 1
        assert rows <= 16
        assert all(len(one.tokens) <= 6 for one in harness.drafter.batches[-1])
        answered_meanwhile += len(harness.take())
    assert steps_until_caught_up <= 190 / 6 + 2
    assert answered_meanwhile >= 4 * (steps_until_caught_up // 5)


def test_more_drafting_sessions_than_rows(make_harness: Make, expect: Expect) -> None:
    harness = make_harness(max_num_batched_tokens=3, num_blocks=100)
    for session_id in range(10):
        harness.open([session_id % 7], session_id=session_id, num_tokens=3)
    harness.open([1] * 100, session_id=10, num_tokens=3)
    events = harness.settle()
    assert sorted(event.address.session_id for event in events) == list(range(11))
    assert all(
        event.body.tokens == expect([event.address.session_id], 3)
        for event in events[:10]
        if event.address.session_id < 7
    )


def test_every_session_gets_its_turn(make_harness: Make) -> None:
    """Five sessions whose commits come at once, and a prompt of 30 tokens, on two rows a step."""
    harness = make_harness(max_num_batched_tokens=2, num_blocks=400, max_num_tokens=4, max_model_len=400)
    texts = {harness.open([session_id], session_id=session_id, num_tokens=2): [session_id] for session_id in range(5)}
    long = harness.open([1] * 30, session_id=99, num_tokens=2)
    answers = dict.fromkeys([*texts, long], 0)
    for _ in range(120):
        harness.batcher.step()
        for event in harness.take():
            answers[event.address] += 1
            if event.address != long:
                text = texts[event.address]
                text.append(6)
                harness.commit(event.address, text, len(text) - 1, num_tokens=2)
    assert answers.pop(long) == 1
    assert max(answers.values()) - min(answers.values()) <= 3
    assert min(answers.values()) >= 10


def test_need_tokens_and_its_answer(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    address = harness.open([1, 2, 3])
    harness.settle()
    text = [1, 2, 3, 4, 5, 6, 0]
    harness.commit(address, text, 5)
    harness.commit(address, [*text, 1], 7)  # sent before the scheduler saw the question: not asked twice
    (event,) = harness.settle()
    assert event.body == NeedTokens(3)
    text = [*text, 1]
    harness.commit(address, text, 3)
    assert only_proposal(harness.settle()).tokens == expect(text, 4)


def test_another_text_is_asked_for_from_the_beginning(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    address = harness.open([1, 2, 3])
    harness.settle()
    text = [1, 5, 3, 4]
    harness.commit(address, text, 3)
    (event,) = harness.settle()
    assert event.body == NeedTokens(0)
    harness.commit(address, text, 0)
    assert only_proposal(harness.settle()).tokens == expect(text, 4)


def test_open_with_a_hash_alone(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    address = Address(1, 1, 1, 1)
    harness.batcher.handle(Open(address, (), 3, hash_tokens([1, 2, 3]), Sampling(), 4))
    (event,) = harness.settle()
    assert event.body == NeedTokens(0)
    harness.commit(address, [1, 2, 3], 0)
    assert only_proposal(harness.settle()).tokens == expect([1, 2, 3], 4)


def test_messages_that_cannot_be_served_end_their_session_only(make_harness: Make) -> None:
    harness = make_harness()
    harness.open([1, 2], session_id=1)
    harness.settle()
    cases = [
        lambda address: harness.batcher.handle(Refuse(address, "sampling.top_p is 7")),
        lambda address: harness.batcher.handle(Open(address, (1, 7), 2, hash_tokens([1, 7]), Sampling(), 4)),
        lambda address: harness.batcher.handle(Open(address, (1, 2), 3, hash_tokens([1, 2]), Sampling(), 4)),
        lambda address: harness.batcher.handle(Open(address, (1, 2), 2, 1234, Sampling(), 4)),
    ]
    for session_id, send in enumerate(cases, start=2):
        send(Address(1, session_id, 1, 1))
        (event,) = harness.settle()
        assert (event.address.session_id, event.body) == (session_id, EvictionReason.UNSPECIFIED)
    assert list(harness.batcher.sessions) == [(1, 1)]


def test_stale_messages_change_nothing(make_harness: Make, expect: Expect) -> None:
    """V1: the same id used again at once; the old session's Close and Commit come late."""
    harness = make_harness()
    old = harness.open([1, 2, 3], generation=1)
    new = harness.open([4, 5], generation=2)
    harness.commit(old, [1, 2, 3, 3], 3)
    harness.close(old)
    proposal = only_proposal(harness.settle())
    assert (proposal.base_len, proposal.tokens) == (2, expect([4, 5], 4))
    early = Address(1, 1, 1, 3)  # of a generation whose Open has not been seen
    harness.commit(early, [4, 5, 1], 2)
    assert harness.settle() == []
    newest = harness.open([6], generation=1, epoch=2)  # a group rebuilt counts generations anew
    harness.close(new)
    assert only_proposal(harness.settle()).tokens == expect([6], 4)
    late = harness.open([1], session_id=77, generation=9, epoch=1)
    assert late.key not in harness.batcher.sessions
    harness.close(newest)
    assert not harness.batcher.sessions
    assert harness.batcher.pool.num_free == 64


def test_epochs_and_sessions_of_other_streams_are_their_own(make_harness: Make) -> None:
    harness = make_harness()
    harness.open([1, 2], stream=1, epoch=5)
    harness.open([1, 2], stream=2, epoch=1)
    assert len(harness.settle()) == 2
    harness.batcher.handle(CloseStream(1))
    assert list(harness.batcher.sessions) == [(2, 1)]


def test_context_limit(make_harness: Make, expect: Expect) -> None:
    """E6: a proposal near the limit is as long as what fits; at the limit the session ends, and others go on."""
    harness = make_harness(max_model_len=20)
    text = [1] * 15
    address = harness.open(text, num_tokens=4)
    assert len(only_proposal(harness.settle()).tokens) == 4
    for length, fits in [(17, 3), (18, 2), (19, 1)]:
        base = len(text)
        text = [*text, 2, 3, 4, 5][:length]
        harness.commit(address, text, base)
        assert only_proposal(harness.settle()).tokens == expect(text, fits)
    harness.commit(address, [*text, 6], 19)
    (event,) = harness.settle()
    assert event.body is EvictionReason.CONTEXT_FULL
    harness.open([1] * 20, generation=2)
    (event,) = harness.settle()
    assert event.body is EvictionReason.CONTEXT_FULL
    assert harness.batcher.pool.num_free == 64


def test_blocks_run_out(make_harness: Make, expect: Expect) -> None:
    """The session opened last gives way; it can be opened again once there is room."""
    harness = make_harness(num_blocks=6, block_size=4, max_num_tokens=4)
    first = harness.open([1] * 8, session_id=1, num_tokens=2)
    second = harness.open([2] * 8, session_id=2, num_tokens=2)
    assert len(harness.settle()) == 2  # three blocks each
    third = harness.open([3] * 4, session_id=3)
    (event,) = harness.settle()
    assert (event.address, event.body) == (third, EvictionReason.NO_MEMORY)
    text = [1] * 8 + [2] * 4
    harness.commit(first, text, 8, num_tokens=2)
    events = harness.settle()
    assert [(event.address, event.body) for event in events[:1]] == [(second, EvictionReason.NO_MEMORY)]
    assert events[1].body.tokens == expect(text, 2)
    harness.close(first)
    harness.open([2] * 8, session_id=2, num_tokens=2)
    assert only_proposal(harness.settle()).tokens == expect([2] * 8, 2)


def test_of_several_younger_sessions_the_youngest_gives_way(make_harness: Make) -> None:
    harness = make_harness(num_blocks=6, block_size=4, max_num_tokens=4)
    sessions = [harness.open([session_id] * 6, session_id=session_id, num_tokens=1) for session_id in (1, 2, 3)]
    assert len(harness.settle()) == 3
    harness.commit(sessions[0], [1] * 9, 6, num_tokens=1)
    events = harness.settle()
    assert (events[0].address, events[0].body) == (sessions[2], EvictionReason.NO_MEMORY)
    assert sessions[1].key in harness.batcher.sessions


def test_a_rollback_gives_blocks_back(make_harness: Make) -> None:
    harness = make_harness(num_blocks=20, block_size=4)
    address = harness.open([1] * 30, num_tokens=8)
    harness.settle()
    assert harness.batcher.pool.num_free == 10
    harness.commit(address, [1] * 30 + [6], 30, num_tokens=0)
    harness.settle()
    assert harness.batcher.pool.num_free == 12
    harness.commit(address, [1] * 5, 5, num_tokens=0)
    harness.settle()
    assert harness.batcher.pool.num_free == 18


def test_a_session_that_cannot_fit_takes_nobody_down(make_harness: Make) -> None:
    harness = make_harness(num_blocks=8, block_size=4)
    holder = harness.open([1] * 20, session_id=1, num_tokens=1)
    middle = harness.open([2] * 4, session_id=2, num_tokens=1)
    younger = harness.open([3] * 2, session_id=3, num_tokens=1)
    harness.settle()
    harness.commit(middle, [2] * 24, 4)
    events = harness.settle()
    assert [(event.address, event.body) for event in events] == [(middle, EvictionReason.NO_MEMORY)]
    assert {holder.key, younger.key} == set(harness.batcher.sessions)


def test_invalid_rows_cut_the_proposal(make_harness: Make, expect: Expect) -> None:
    """S9: what was drawn before the row is offered, the row's own token never; other sessions do not notice."""
    harness = make_harness()
    harness.drafter.invalid_positions = {5}
    address = harness.open([1, 2, 3], session_id=1)
    harness.open([1, 2, 3, 4, 5, 6], session_id=2)
    by_session = {event.address.session_id: event.body for event in harness.settle()}
    assert by_session[1].tokens == expect([1, 2, 3], 2)
    assert len(by_session[2].tokens) == 4
    text = [1, 2, 3, *expect([1, 2, 3], 2)]
    harness.commit(address, text, 3)
    assert harness.settle() == []  # nothing before the row: nothing is sent
    harness.drafter.invalid_positions = set()
    text = [*text, 6]
    harness.commit(address, text, 5)
    assert only_proposal(harness.settle()).tokens == expect(text, 4)
    harness.check_caches()


def test_invalid_rows_now_and_then_do_not_end_a_session(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    text = [1, 2, 3]
    address = harness.open(text)
    for number in range(12):
        harness.drafter.invalid_positions = set(range(100)) if number % 3 else set()
        text.append((expect(text, 1)[0] + 1) % 7)  # not what was drafted: no head start
        harness.commit(address, text, len(text) - 1)
        assert len(harness.settle()) == (number % 3 == 0)


def test_tokens_before_an_invalid_row_are_offered_however_often_it_was_invalid(
    make_harness: Make, expect: Expect
) -> None:
    """Under rejection: a row depends on the token before it, so it must not decide whether that token is offered."""
    harness = make_harness()
    text = [1, 2, 3]
    harness.drafter.invalid_positions = {len(text) + 1}
    address = harness.open(text, verifier=Verifier.REJECTION)
    assert only_proposal(harness.settle()).tokens == expect(text, 1)
    for _ in range(4):
        text.append((expect(text, 1)[0] + 1) % 7)
        harness.drafter.invalid_positions = {len(text) + 1}
        harness.commit(address, text, len(text) - 1)
        assert only_proposal(harness.settle()).tokens == expect(text, 1)


def test_rows_that_stay_invalid_end_the_session(make_harness: Make, expect: Expect) -> None:
    harness = make_harness()
    harness.drafter.invalid_positions = set(range(100))
    text = [1, 2, 3]
    address = harness.open(text)
    assert harness.settle() == []
    for _ in range(2):
        assert address.key in harness.batcher.sessions
        text.append(1)
        harness.commit(address, text, len(text) - 1)
        events = harness.settle()
    assert [event.body for event in events] == [EvictionReason.INVALID_LOGITS]
    harness.drafter.invalid_positions = set()
    harness.open(text)
    assert only_proposal(harness.settle()).tokens == expect(text, 4)

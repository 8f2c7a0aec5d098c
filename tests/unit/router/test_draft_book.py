"""Sessions of drafts that have a text to catch up with, in simulated time."""

from __future__ import annotations

import pytest

from outrider.router.draft_book import LONGEST_SILENCE_S, LONGEST_SILENCE_TOKEN_S
from outrider.router.draft_session import DraftSession, SessionState
from outrider.router.policy import Pace, Throttle

STEP_S = 1.0


class Stream:
    """One request, and a draft that proposes when it is told to; about as long as a step for each proposal."""

    def __init__(self, toy) -> None:
        self.world = toy.World(toy.group_info(max_model_len=2000, num_blocks=2000))
        self.draft = self.world.join("a", max_model_len=2000)
        self.book = self.world.scheduler._books.drafts

        self.stale: tuple | None = None

    @property
    def session(self) -> DraftSession:
        (session,) = self.book.drafts["a"].sessions.values()
        return session

    def round(self) -> bool:
        """A step of its own right after the last; False where it is held back."""
        if self.world.start() is None:
            return False
        self.world.now += STEP_S
        self.world.finish()
        return True

    def prepare(self) -> tuple:
        """The proposal that the draft was asked for last, to be sent now or later."""
        (session_id,) = self.draft.texts
        assert self.draft.asked[session_id]
        return session_id, self.draft.propose(self.draft.texts[session_id], self.draft.asked[session_id])

    def send(self, prepared: tuple) -> None:
        self.world.scheduler.draft_proposed("a", *prepared, self.world.now)


def opened_behind_the_target(toy) -> Stream:
    """A draft that is known to be quick got the text when the target was done with it."""
    stream = Stream(toy)
    stream.world.leave("a")
    stream.world.add("r", [1, 7, 7], num_speculative_tokens=4)
    for _ in range(3):
        assert stream.round()
    stream.draft = stream.world.join("a", max_model_len=2000)
    stream.session.latency = Pace(alone_s=0.1)
    assert stream.world.start() is not None
    return stream


def test_a_draft_that_got_a_text_late_is_not_waited_for_until_it_has_it(toy) -> None:
    stream = opened_behind_the_target(toy)
    stream.world.now += STEP_S
    stream.world.finish()
    for _ in range(8):  # as long as it takes in the text
        assert stream.book.is_any_at_work, "steps beside it would be taken for steps alone"
        assert stream.round()
    stream.send(stream.prepare())
    assert stream.session.state is SessionState.DRAFTING
    assert stream.session.latency == Pace(alone_s=0.1)  # how long it took to catch up says nothing
    assert stream.round()
    assert stream.world.start() is None, "it has the text now"


def rested(toy) -> Stream:
    """A draft that is known to be quick was told to rest while it was at a proposal, and later to go on."""
    stream = Stream(toy)
    stream.world.add("r", [1, 7, 7], num_speculative_tokens=4)
    for _ in range(4):
        assert stream.round()
        stream.world.now += 0.1
        stream.send(stream.prepare())
    assert stream.session.latency.alone_s is not None
    assert stream.round()
    stream.stale = stream.prepare()
    stream.world.now += STEP_S  # nobody waits longer
    stream.session.request.throttle = Throttle(pause=3)
    assert stream.round()
    assert stream.session.is_resting
    for _ in range(4):
        if stream.session.is_resting:
            assert stream.round()
    assert not stream.session.is_resting
    return stream


def test_a_proposal_from_before_a_rest_does_not_tell_that_a_draft_has_caught_up(toy) -> None:
    stream = rested(toy)
    latency, last = stream.session.latency, stream.book.drafts["a"].latencies.last
    stream.send(stream.stale)
    assert not stream.session.is_ready
    assert stream.round(), "it was not waited for"
    stream.world.now += 2 * STEP_S
    stream.send(stream.prepare())
    assert stream.session.is_ready
    assert (stream.session.latency, stream.book.drafts["a"].latencies.last) == (latency, last)


def never_answered(toy) -> Stream:
    stream = Stream(toy)
    stream.world.add("r", [1, 7, 7], num_speculative_tokens=4)
    return stream


@pytest.mark.parametrize("begin", [never_answered, opened_behind_the_target, rested])
def test_a_draft_that_does_not_answer_is_not_at_work_for_ever(toy, begin) -> None:
    """Or every step would count as one beside drafts."""
    stream = begin(toy)
    if stream.world.pending is not None:
        stream.world.now += STEP_S
        stream.world.finish()
    assert stream.round()
    assert stream.book.is_any_at_work
    began = stream.world.now
    longest_s = LONGEST_SILENCE_S + LONGEST_SILENCE_TOKEN_S * stream.session.request.end_len
    while stream.book.is_any_at_work:
        assert stream.round()
        assert stream.world.now - began <= longest_s
    stream.send(stream.prepare())
    assert stream.round()
    assert stream.book.is_any_at_work

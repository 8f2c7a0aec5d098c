"""What is known of a draft worker and of the requests that it drafts for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from outrider.router.draft_latency import Latencies
from outrider.router.drafts import DraftFacts
from outrider.router.policy import Pace, averaged
from outrider.router.requests import Request


class SessionState(enum.Enum):
    """A request without a session has none yet, lost it, or found no draft that can serve it."""

    OPENING = "opening"  # the draft catches up with the text; how long that takes says nothing of later proposals
    CATCHING_UP = "catching up"  # likewise, while the target is done with the text; nobody waits for it
    DRAFTING = "drafting"


@dataclass(eq=False)
class DraftSession:
    """One request's state in one draft worker, as far as the scheduler knows it.

    Attributes:
        told: for each length of the text that the draft was told and may still answer, the time of telling.
        expected_since: when the draft was last asked for tokens that have not come, or None.
        silent_since: since when nothing came, while it was asked for tokens, or None.
        latency: time from a commit to its proposal, with no step running meanwhile and beside one.
        lag_tokens: averaged number of tokens committed between a proposal's base and its first possible use.
        needed_len: length of the text when it was last to catch up; what it proposes behind less of it was asked for
            before it rested.
        is_prompt: whether its last proposal was not overdue; only then is it waited for.
        is_waited_for: whether the step after its last commit was to wait for its proposal.
        unmeasured_base: base of a proposal that came during a step, whose lag is known once the step is over.
        num_told: length of the text that the draft knows.
        is_resting: whether it was told to propose nothing. Then it is told nothing more: keeping up costs passes too,
            and one over many tokens costs less than as many over one.
    """

    session_id: int
    draft_id: str
    request: Request
    state: SessionState = SessionState.OPENING
    told: dict[int, float] = field(default_factory=dict)
    expected_since: float | None = None
    silent_since: float | None = None
    latency: Pace = field(default_factory=Pace)
    lag_tokens: float = 0.0
    needed_len: int = 0
    is_prompt: bool = True
    is_waited_for: bool = False
    unmeasured_base: int | None = None
    num_told: int = 0
    is_resting: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the draft should have caught up with the text: it had as long as the target, if both began then."""
        return self.state is SessionState.DRAFTING or (self.state is SessionState.OPENING and bool(self.told))

    @property
    def is_at_work(self) -> bool:
        return not self.is_resting and self.is_prompt and (self.expected_since is not None or not self.is_ready)


@dataclass(eq=False)
class Draft:
    """A connected draft worker."""

    facts: DraftFacts
    sessions: dict[int, DraftSession] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def latency(self) -> Pace:
        """What a proposal is expected to take now."""
        return self.latencies.expected(len(self.sessions))

    def drop(self, session_id: int) -> None:
        """A session is over. Where that leaves notably fewer, the others need not learn how long proposals take."""
        before = self.latency
        del self.sessions[session_id]
        if (now := self.latency) != before:
            for session in self.sessions.values():
                session.latency = now


def rest_or_resume(session: DraftSession, num_tokens: int) -> None:
    """What asking for nothing, or for something again, means for a session."""
    if session.is_resting and num_tokens:
        session.state = SessionState.CATCHING_UP
        session.needed_len = len(session.request.text)
        session.is_prompt = True
    if not num_tokens:
        session.told, session.silent_since = {}, None
    session.is_resting = not num_tokens


def measure_lag(session: DraftSession, base_len: int) -> None:
    lag = max(0, len(session.request.text) - base_len)
    session.lag_tokens = averaged(session.lag_tokens, lag) if lag < session.lag_tokens else float(lag)

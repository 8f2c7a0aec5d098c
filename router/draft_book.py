"""Who drafts for whom: draft workers that are connected, their sessions, and what is to be sent to them."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.core.histogram import STEP_S, Histogram
from outrider.router.draft_session import Draft, DraftSession, SessionState, measure_lag, rest_or_resume
from outrider.router.drafts import DraftClose, DraftCommit, DraftEvent, DraftFacts, DraftOpen, EvictionReason
from outrider.router.policy import Pace, give_up_after, num_tokens_to_ask
from outrider.router.requests import Request
from outrider.router.snapshots import DraftSnapshot

FIRST_RETRY_S = 0.25  # after a draft dropped a session; doubles with each further loss
LONGEST_RETRY_S = 16.0
# A draft that says nothing for so long, and so much longer for each token of the text, is not at work on it.
LONGEST_SILENCE_S, LONGEST_SILENCE_TOKEN_S = 10.0, 0.01
MAX_TOLD = 64  # unanswered commits whose time is remembered


class DraftBook:
    """Drafts, their sessions, and the messages that wait to be sent to them.

    The methods change ``request.session`` and what hangs on it, and nothing else of a request but the bookkeeping of
    lost sessions.

    Attributes:
        proposal_time: seconds from telling a draft of a commit to its proposal, of all drafts.
    """

    def __init__(self) -> None:
        self.drafts: dict[str, Draft] = {}
        self.proposal_time = Histogram(STEP_S)
        self._outbox: list[DraftEvent] = []
        self._next_session_id = 1

    def snapshots(self) -> tuple[DraftSnapshot, ...]:
        return tuple(
            DraftSnapshot(
                draft_id=draft.facts.draft_id,
                drafter=draft.facts.drafter,
                num_sessions=len(draft.sessions),
                proposal_ms=1000.0 * (draft.latencies.last.slowest_s or 0.0),
                num_draft_tokens=draft.num_draft_tokens,
                num_accepted_tokens=draft.num_accepted_tokens,
            )
            for draft in self.drafts.values()
        )

    def count(self, draft_id: str, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a round that verified a draft's proposal."""
        draft = self.drafts.get(draft_id)
        if draft is not None:
            draft.num_draft_tokens += num_draft_tokens
            draft.num_accepted_tokens += num_accepted

    def take_events(self) -> list[DraftEvent]:
        events, self._outbox = self._outbox, []
        return events

    def join(self, facts: DraftFacts, now: float) -> None:
        self.leave(facts.draft_id, now)
        self.drafts[facts.draft_id] = Draft(facts)

    def leave(self, draft_id: str, now: float) -> None:
        draft = self.drafts.pop(draft_id, None)
        if draft is None:
            return
        for session in draft.sessions.values():
            session.request.session = None
            session.request.draft_retry_at = now
        self._outbox = [event for event in self._outbox if event.draft_id != draft_id]

    def find(self, draft_id: str, session_id: int) -> DraftSession | None:
        draft = self.drafts.get(draft_id)
        return draft.sessions.get(session_id) if draft is not None else None

    def assign(self, requests: Iterable[Request], now: float) -> None:
        """Open a session for each request that wants one and has none, with the draft that has the fewest."""
        for request in requests:
            if request.session is not None or request.num_useful_proposals == 0 or now < request.draft_retry_at:
                continue
            able = [
                draft
                for draft in self.drafts.values()
                if draft.facts.draft_id not in request.excluded_drafts and draft.facts.max_model_len > len(request.text)
            ]
            if able:
                self._open(request, min(able, key=lambda draft: len(draft.sessions)), now)

    def _open(self, request: Request, draft: Draft, now: float) -> None:
        session = DraftSession(self._next_session_id, draft.facts.draft_id, request, num_told=len(request.text))
        self._next_session_id += 1
        draft.sessions[session.session_id] = session
        session.latency = draft.latency  # among as many as they are with this one
        request.session = session
        num_tokens = self._num_tokens(session, draft.facts, session.lag_tokens)
        if request.num_missing == 1:  # the target has the text already
            session.state = SessionState.CATCHING_UP
            if num_tokens:  # nothing will be told before this proposal is due
                session.expected_since = session.silent_since = session.told[len(request.text)] = now
        self._outbox.append(
            DraftOpen(
                draft_id=session.draft_id,
                session_id=session.session_id,
                request_id=request.new.request_id,
                generation=request.new.generation,
                tokens=tuple(request.text.tokens),
                prefix_hash=request.text.hashes[-1],
                sampling=request.new.sampling,
                num_tokens=num_tokens,
                traceparent=request.trace.traceparent if request.trace is not None else "",
            )
        )

    def commit(
        self,
        request: Request,
        base_len: int,
        proposal_id: int,
        num_accepted: int,
        now: float,
        *,
        is_waited_for: bool = False,
    ) -> None:
        """Tell the request's draft, if any, that the text continues from ``base_len`` as it now does.

        ``is_waited_for``: nothing will be committed before its proposal comes.
        """
        session = request.session
        if session is None:
            return
        facts = self.drafts[session.draft_id].facts
        if len(request.text) >= facts.max_model_len:
            self.close(request)
            request.excluded_drafts.add(session.draft_id)
            return
        if session.unmeasured_base is not None:
            measure_lag(session, session.unmeasured_base)
            session.unmeasured_base = None
        num_tokens = self._num_tokens(session, facts, 0.0 if is_waited_for else session.lag_tokens)
        base_len = session.num_told = min(base_len, session.num_told)
        if session.is_resting and not num_tokens:
            return
        self.note_overdue(session, now)  # what was asked for last did not come within a whole step
        rest_or_resume(session, num_tokens)
        session.is_waited_for = is_waited_for
        session.expected_since = now if num_tokens else None
        if num_tokens:
            session.told[len(request.text)] = now
            session.silent_since = now if session.silent_since is None else session.silent_since
            if len(session.told) > MAX_TOLD:
                del session.told[next(iter(session.told))]
        self._outbox.append(
            DraftCommit(
                draft_id=session.draft_id,
                session_id=session.session_id,
                generation=request.new.generation,
                base_len=base_len,
                tokens=tuple(request.text.tokens[base_len:]),
                proposal_id=proposal_id,
                num_accepted=num_accepted,
                hash=request.text.hashes[-1],
                num_tokens=num_tokens,
                traceparent=request.trace.traceparent if request.trace is not None else "",
            )
        )
        session.num_told = len(request.text)

    def close(self, request: Request) -> None:
        session = request.session
        if session is None:
            return
        request.session = None
        self.drafts[session.draft_id].drop(session.session_id)
        self._outbox.append(DraftClose(session.draft_id, session.session_id, request.new.generation))

    def evicted(self, session: DraftSession, reason: EvictionReason, now: float) -> None:
        """The draft dropped the session; another may be opened after a while, but not where the text does not fit."""
        request = session.request
        request.session = None
        self.drafts[session.draft_id].drop(session.session_id)
        if reason is EvictionReason.CONTEXT_FULL:
            request.excluded_drafts.add(session.draft_id)
            return
        request.draft_retry_at = now + min(FIRST_RETRY_S * 2**request.num_lost_sessions, LONGEST_RETRY_S)
        request.num_lost_sessions += 1

    def arrived(
        self, session: DraftSession, base_len: int, in_flight: bool, now: float, last_step: float = 0.0
    ) -> None:
        """Learn from the arrival of a proposal how long the draft takes and how late it comes.

        Args:
            in_flight: whether a step runs that may write for the request.
            last_step: until when a step of whatever requests ran: ``now`` where one runs.
        """
        if base_len < session.needed_len:
            return
        told_at = session.told.get(base_len)
        session.told = {length: at for length, at in session.told.items() if length > base_len}
        caught_up = session.state is SessionState.CATCHING_UP
        if session.state is not SessionState.DRAFTING:  # it had to catch up: not what to expect from now on
            session.state = SessionState.DRAFTING
        elif told_at is not None:
            draft, latency_s = self.drafts[session.draft_id], now - told_at
            self.proposal_time.observe(latency_s)
            beside = last_step > told_at
            in_vain = beside and session.is_waited_for
            session.latency = session.latency.took(latency_s, beside=beside, in_vain=in_vain)
            draft.latencies.took(len(draft.sessions), latency_s, beside=beside)
        session.silent_since = now if session.told else None
        if not session.told:
            session.expected_since = None
        session.is_prompt = session.expected_since is None or not self._is_overdue(session, now)
        if caught_up:
            return
        if in_flight:
            session.unmeasured_base = base_len
        else:
            measure_lag(session, base_len)

    def note_overdue(self, session: DraftSession, now: float) -> None:
        """Stop waiting for a session whose proposal should have come, until one comes again."""
        if session.is_prompt and self._is_overdue(session, now):
            session.is_prompt = False

    def predicted(self, session: DraftSession) -> tuple[float, Pace] | None:
        """Since when and for how long a proposal of this session is predicted to take; None: do not wait for it."""
        if not session.is_ready or not session.is_prompt:
            return None
        if session.expected_since is None or session.latency.slowest_s is None:
            return None
        return session.expected_since, session.latency

    @property
    def is_any_at_work(self) -> bool:
        """Whether drafts catch up with a prompt, or owe a proposal that is not overdue."""
        return any(session.is_at_work for draft in self.drafts.values() for session in draft.sessions.values())

    def _is_overdue(self, session: DraftSession, now: float) -> bool:
        if session.expected_since is None:
            return False
        slowest_s = session.latency.slowest_s
        if slowest_s is None or session.state is SessionState.CATCHING_UP:  # who knows how long it takes
            longest_s = LONGEST_SILENCE_S + LONGEST_SILENCE_TOKEN_S * len(session.request.text)
            return session.silent_since is not None and now - session.silent_since >= longest_s
        return now - session.expected_since >= give_up_after(slowest_s)

    @staticmethod
    def _num_tokens(session: DraftSession, facts: DraftFacts, lag_tokens: float) -> int:
        request = session.request
        if not request.throttle.is_on:
            return 0
        wanted = num_tokens_to_ask(request.num_allowed_tokens, lag_tokens, facts.max_num_tokens)
        length = len(request.text)
        return max(0, min(wanted, request.end_len - length - 1, facts.max_model_len - length))

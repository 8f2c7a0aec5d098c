"""The group scheduler: which rows run in the next step (``planning.py``), and what a step's outcome means for each
request (``outcomes.py``).

Plain synchronous code; time is an argument. A driver calls it like this::

    scheduler.add(...) / abort(...) / draft_joined(...) / draft_proposed(...) / ...   # whenever something happens
    for committed in scheduler.expire(now): deliver(committed)
    plan = scheduler.schedule(now)          # None: nothing to run yet; look again at scheduler.next_wakeup(now)
    for event in scheduler.draft_events(): send(event)        # after every call that may have produced some
    for committed in scheduler.complete(result, now): deliver(committed)
    for event in scheduler.draft_events(): send(event)
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.block_pool import BlockPool
from outrider.core.histogram import Histogram
from outrider.core.plan import GroupInfo, StepPlan, StepResult
from outrider.core.proposal import Proposal, sound_part
from outrider.router.batch import Batcher
from outrider.router.books import Books
from outrider.router.checks import end_length
from outrider.router.counts import SchedulerCounts
from outrider.router.drafts import DraftEvent, DraftFacts, EvictionReason
from outrider.router.families import new_family
from outrider.router.outcomes import complete, end
from outrider.router.planning import StepPlanner
from outrider.router.requests import Committed, Cutter, FinishReason, NewRequest, NoStops, Request
from outrider.router.round_trace import MakeTrace, no_trace
from outrider.router.rounds import refusal
from outrider.router.settings import SchedulerSettings
from outrider.router.snapshots import SchedulerSnapshot
from outrider.router.suspects import failure_message, group_failed
from outrider.router.weighing import draft_came, forget_goodput


def no_stops(request: NewRequest) -> Cutter:
    """The cutter of a request without stop strings."""
    return NoStops()


class Scheduler:
    """Schedules the requests of one target group: one step that runs, and at most one planned ahead behind it."""

    def __init__(
        self,
        info: GroupInfo,
        settings: SchedulerSettings,
        *,
        epoch: int,
        make_cutter: Callable[[NewRequest], Cutter] = no_stops,
        make_trace: MakeTrace = no_trace,
    ) -> None:
        batcher = Batcher(info, settings.max_num_seqs, enable_prefix_caching=settings.enable_prefix_caching)
        self._books = books = Books(info, settings, epoch, batcher)
        self._planner = StepPlanner(books)
        self._make_cutter = make_cutter
        self._make_trace = make_trace
        self._requests, self._batcher, self._drafts = books.requests, books.batcher, books.drafts
        self._flight, self._pacer = books.flight, books.pacer

    @property
    def info(self) -> GroupInfo:
        return self._books.info

    @property
    def settings(self) -> SchedulerSettings:
        return self._books.settings

    @property
    def epoch(self) -> int:
        return self._books.epoch

    @property
    def counts(self) -> SchedulerCounts:
        """What happened, for status and metrics."""
        return self._books.counts

    def add(self, request: NewRequest, now: float) -> None:
        """Queue a request, all its choices or none.

        Raises ``InvalidRequest``, ``Overloaded`` or ``Conflict`` and then changes nothing.
        """
        end_len = end_length(request, self.info)
        self._requests.check_room(request, self.settings.max_num_seqs + self.settings.max_queue)
        if not self._requests:
            self._pacer.ready_since = now
        k = request.num_speculative_tokens
        k = self.settings.num_speculative_tokens if k is None else k
        family = new_family(
            request,
            end_len=end_len,
            num_speculative_tokens=k,
            make_cutter=self._make_cutter,
            lookup_lengths=self.settings.lookup_lengths,
            queued_at=now,
        )
        for member in family.members.values():
            member.trace = self._make_trace(member.new)
            if member.is_governed:
                member.level = self._books.governor.level
        self._requests.add(family)
        self._batcher.waiting.extend(family.members.values())

    def abort(self, request_id: str, reason: str, now: float, choice: int | None = None) -> list[Committed]:
        """End a request, or one of its choices, at once (finish reason ABORT). Empty: nothing of it runs.

        The id of a request without choices may be used again immediately.
        """
        choices = [r for r in self._requests.choices(request_id) if choice in (None, r.choice)]
        return [end(self._books, request, FinishReason.ABORT, error_message=reason) for request in choices]

    def expire(self, now: float) -> list[Committed]:
        """End the requests whose deadline has passed (finish reason DEADLINE)."""
        late = [r for r in self._requests if r.new.deadline is not None and r.new.deadline <= now]
        return [
            end(self._books, request, FinishReason.DEADLINE, error_message="the deadline has passed")
            for request in late
        ]

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None: nothing is to do, or not yet (``next_wakeup``).

        While a step is in flight that is the one after it, where it can be planned ahead and its time has come.
        """
        return self._planner.plan(now)

    def next_wakeup(self, now: float) -> float | None:
        """When to call ``expire`` and ``schedule`` again if nothing happens before; None: not at all."""
        return self._planner.next_wakeup(now)

    def ahead_at(self) -> float | None:
        """When the step after the one that runs may be planned, if it can be; None: only when that one is over."""
        return self._planner.ahead_at()

    def complete(self, result: StepResult, now: float) -> list[Committed]:
        """Take in a step's outcome. An outcome of another epoch or step is dropped.

        Raises ``GroupError`` and changes nothing if the outcome contradicts the plan: the group must be rebuilt.
        """
        return complete(self._books, result, now)

    def reset(self, epoch: int, info: GroupInfo) -> list[Committed]:
        """The group was rebuilt: running requests start over from their committed tokens, draft sessions live on.

        Returns the ends of requests that the group does not survive, and of those that it cannot hold (normally none).
        """
        self._books.epoch, self._books.info = epoch, info
        self.counts.num_resets += 1
        guilty = group_failed([request for request in self._flight.requests if not request.ended])
        self._flight.clear()
        self._pacer.group_changed()
        forget_goodput(self._books)
        self._batcher.reset(info, self.settings.max_num_seqs)
        room = min(info.max_model_len, self._batcher.num_pool_positions + 1)
        messages = {request: failure_message(request) for request in guilty}
        misfits = [request for request in self._requests if request.end_len > room and request not in messages]
        messages |= {request: f"the target group was rebuilt with room for {room} tokens only" for request in misfits}
        return [end(self._books, request, FinishReason.ERROR, error_message=why) for request, why in messages.items()]

    def update_settings(self, settings: SchedulerSettings) -> None:
        """Takes effect for requests added from now on."""
        if settings.num_speculative_tokens != self.settings.num_speculative_tokens:
            forget_goodput(self._books)
        self._books.settings = settings
        self._batcher.limit(settings.max_num_seqs)

    def draft_joined(self, draft: DraftFacts, now: float) -> None:
        """A draft worker with the group's tokenizer can be used. Joining under a known id replaces the old one."""
        self._drafts.join(draft, now)
        self._pacer.drafts_changed()
        draft_came(self._books, draft)
        for request in self._requests:
            request.excluded_drafts.discard(draft.draft_id)
        self._drafts.assign(self._batcher.running, now)

    def draft_left(self, draft_id: str, now: float) -> None:
        """The stream to a draft ended: its sessions are gone and it is told nothing more."""
        self._drafts.leave(draft_id, now)
        self._drafts.assign(self._batcher.running, now)

    def draft_events(self) -> list[DraftEvent]:
        """What is to be sent to drafts, oldest first; each event is returned once."""
        return self._drafts.take_events()

    def draft_proposed(self, draft_id: str, session_id: int, proposal: Proposal, now: float) -> str | None:
        """A draft's proposal. Returns why it was dropped, or None."""
        session = self._drafts.find(draft_id, session_id)
        if session is None:
            return "no such session"
        return self._offer(session.request, proposal, draft_id, now)

    def draft_evicted(self, draft_id: str, session_id: int, reason: EvictionReason, now: float) -> None:
        """A draft dropped a session. The request may get another one later."""
        session = self._drafts.find(draft_id, session_id)
        if session is not None:
            self._drafts.evicted(session, reason, now)

    def draft_needs_tokens(self, draft_id: str, session_id: int, from_len: int, now: float) -> None:
        """Answered by a ``DraftCommit`` with ``base_len`` = ``from_len``."""
        session = self._drafts.find(draft_id, session_id)
        if session is not None:
            self._drafts.commit(session.request, min(from_len, len(session.request.text)), 0, 0, now)

    def offer(
        self, request_id: str, generation: int, proposal: Proposal, draft_id: str, now: float, choice: int = 0
    ) -> str | None:
        """A proposal for a request, from whatever drafter. Returns why it was dropped, or None.

        The newest one is kept. A dropped proposal costs speed, never text.
        """
        request = self._requests.find(request_id, choice)
        if request is None or request.new.generation != generation:
            return "no such request"
        return self._offer(request, proposal, draft_id, now)

    def _offer(self, request: Request, proposal: Proposal, draft_id: str, now: float) -> str | None:
        if request.session is not None and request.session.draft_id == draft_id:
            last_step = now if len(self._flight) else self._pacer.ready_since
            carried = self._flight.carries(request)
            self._drafts.arrived(request.session, proposal.base_len, carried, now, last_step)
        proposal = sound_part(proposal, self.info.vocab_size)
        reason = refusal(proposal, request.text, self.info.vocab_size)
        if reason is None and (request.num_allowed_tokens == 0 or not request.throttle.is_on):
            reason = "speculation is off"
        held = request.proposal
        if reason is None and held is not None and held.base_len > proposal.base_len:
            reason = "older than the one at hand"
        if reason is None:
            request.proposal, request.proposal_draft = proposal, draft_id
        self.counts.offered(kept=reason is None)
        return reason

    @property
    def is_idle(self) -> bool:
        """Whether no request is there and no step in flight."""
        return not self._requests and not len(self._flight)

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and have no result yet."""
        return len(self._flight)

    @property
    def pool(self) -> BlockPool:
        """The blocks of the cache. Whoever else takes some while the scheduler is idle gives them back."""
        return self._batcher.pool

    def take_released(self) -> tuple[int, ...]:
        """Sequences that the group may forget: for plans that others send while the scheduler is idle."""
        return self._batcher.take_released()

    def snapshot(self) -> SchedulerSnapshot:
        """Counts for status and metrics."""
        return SchedulerSnapshot(
            epoch=self.epoch,
            num_waiting=len(self._batcher.waiting),
            num_running=len(self._batcher.running),
            num_steps=self._planner.num_steps,
            num_blocks=self._batcher.pool.num_blocks,
            num_free_blocks=self._batcher.pool.num_free,
            num_cached_blocks=self._batcher.pool.num_cached,
            prefix_cache_queries=self._batcher.num_queried_tokens,
            prefix_cache_hits=self._batcher.num_hit_tokens,
            num_preemptions=self._batcher.num_preemptions,
            num_lookup_tokens=self.counts.lookup.num_draft_tokens,
            num_lookup_accepted=self.counts.lookup.num_accepted_tokens,
            drafts=self._drafts.snapshots(),
            speculation=self._books.governor.snapshot(),
        )

    @property
    def proposal_time(self) -> Histogram:
        """From telling a draft of a commit to its proposal; those of prefixes that it had to catch up with left out."""
        return self._drafts.proposal_time

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books do not balance."""
        self._books.check_integrity()

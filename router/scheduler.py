"""The group scheduler: which rows run in the next step, and what a step's outcome means for each request.

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
from dataclasses import replace

from outrider.core.block_pool import BlockPool
from outrider.core.histogram import Histogram
from outrider.core.plan import GroupInfo, SequenceError, SequenceResult, StepPlan, StepResult
from outrider.core.proposal import Proposal, sound_part
from outrider.router.ahead import LEAD_S, rows_ahead
from outrider.router.batch import Batcher, LimitPrompts
from outrider.router.books import check_books
from outrider.router.checks import end_length
from outrider.router.counts import SchedulerCounts
from outrider.router.draft_book import DraftBook
from outrider.router.drafts import DraftEvent, DraftFacts, EvictionReason
from outrider.router.families import RequestBook, new_family
from outrider.router.flight import Flight, Step
from outrider.router.hearing import heard, learn, usable
from outrider.router.pacing import Pacer
from outrider.router.requests import Committed, Cutter, FinishReason, NewRequest, NoStops, Request, RoundFacts
from outrider.router.round_trace import MakeTrace, no_trace, step_traces
from outrider.router.rounds import Cut, counted, cut, finished, num_verified, refusal
from outrider.router.settings import SchedulerSettings
from outrider.router.snapshots import SchedulerSnapshot
from outrider.router.step_cost import fair_slowdown
from outrider.router.step_rows import Rows
from outrider.router.suspects import failure_message, group_failed, progressed


def no_stops(request: NewRequest) -> Cutter:
    """The cutter of a request without stop strings."""
    return NoStops()


class Scheduler:
    """Schedules the requests of one target group: one step that runs, and at most one planned ahead behind it.

    Attributes:
        counts: what happened, for status and metrics.
    """

    def __init__(
        self,
        info: GroupInfo,
        settings: SchedulerSettings,
        *,
        epoch: int,
        make_cutter: Callable[[NewRequest], Cutter] = no_stops,
        make_trace: MakeTrace = no_trace,
    ) -> None:
        self.info = info
        self.settings = settings
        self.epoch = epoch
        self.counts = SchedulerCounts()
        self._make_cutter = make_cutter
        self._make_trace = make_trace
        self._requests = RequestBook()
        self._batcher = Batcher(info, settings.max_num_seqs, enable_prefix_caching=settings.enable_prefix_caching)
        self._drafts = DraftBook()
        self._flight = Flight()
        self._num_steps = 0
        self._pacer = Pacer()
        self._held_until: float | None = None

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
        self._requests.add(family)
        self._batcher.waiting.extend(family.members.values())

    def abort(self, request_id: str, reason: str, now: float, choice: int | None = None) -> list[Committed]:
        """End a request, or one of its choices, at once (finish reason ABORT). Empty: nothing of it runs.

        The id of a request without choices may be used again immediately.
        """
        choices = [r for r in self._requests.choices(request_id) if choice in (None, r.choice)]
        return [self._end(request, FinishReason.ABORT, error_message=reason) for request in choices]

    def expire(self, now: float) -> list[Committed]:
        """End the requests whose deadline has passed (finish reason DEADLINE)."""
        late = [r for r in self._requests if r.new.deadline is not None and r.new.deadline <= now]
        return [self._end(request, FinishReason.DEADLINE, error_message="the deadline has passed") for request in late]

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None: nothing is to do, or not yet (``next_wakeup``).

        While a step is in flight that is the one after it, where it can be planned ahead and its time has come.
        """
        self._held_until = None
        if not self._requests:
            return None
        if len(self._flight):
            due = self.ahead_at()
            if due is None or now < due:
                return None
            (step,) = self._flight
            rows = rows_ahead(self._batcher, step, self._limit_prompts)
            return self._planned(rows, now, before=step) if rows else None
        others = 1 if self._batcher.can_admit() else 0
        self._held_until = self._pacer.hold_until(self._batcher.running, others, self._drafts, now)
        if self._held_until is not None:
            return None
        resting = self._pacer.sitting_out(self._batcher.running, self._drafts, now)
        return self._planned(self._batcher.build(heard, resting, self._limit_prompts), now)

    def _planned(self, rows: list[Rows], now: float, before: Step | None = None) -> StepPlan:
        self._num_steps += 1
        plan = StepPlan(
            epoch=self.epoch,
            step=self._num_steps,
            sequences=tuple(part.plan for part in rows),
            released=self._batcher.take_released(),
            after_step=before.plan.step if before is not None else None,
            traces=step_traces(rows, before),
        )
        self._flight.add(plan, rows, now, beside_drafts=self._drafts.is_any_at_work)
        for part in rows:
            self.counts.began(part.request, now)
        self._drafts.assign(self._batcher.running, now)
        return plan

    def next_wakeup(self, now: float) -> float | None:
        """When to call ``expire`` and ``schedule`` again if nothing happens before; None: not at all."""
        times = [r.new.deadline for r in self._requests if r.new.deadline is not None]
        if not len(self._flight) and self._requests:
            times.append(now if self._held_until is None else self._held_until)
        elif (due := self.ahead_at()) is not None and due > now:
            times.append(due)
        return min(times, default=None)

    def ahead_at(self) -> float | None:
        """When the step after the one that runs may be planned, if it can be; None: only when that one is over."""
        if not self.settings.plan_ahead or len(self._flight) != 1:
            return None
        (step,) = self._flight
        expected_s = self._pacer.expected_s(step.rows.values())
        return None if expected_s is None else step.started + max(0.0, expected_s - LEAD_S)

    def complete(self, result: StepResult, now: float) -> list[Committed]:
        """Take in a step's outcome. An outcome of another epoch or step is dropped.

        Raises ``GroupError`` and changes nothing if the outcome contradicts the plan: the group must be rebuilt.
        """
        step = self._flight.land(result, self.info.vocab_size, now)
        if step is None:
            return []
        self._pacer.ready_since = now
        self._pacer.step_took(step.rows.values(), now - step.started, beside_drafts=step.beside_drafts)
        waits = self._pacer.will_wait(self._batcher.running)
        committed = []
        for outcome in result.sequences:
            part = step.rows[outcome.seq_id]
            request = part.request
            if request.ended:
                if not self._flight.carries(request):
                    self._batcher.release(request)
            elif outcome.error is SequenceError.UNDECIDED:
                continue  # it runs again from where it is
            elif outcome.error not in (None, SequenceError.NOT_READY):
                committed.append(self._end(request, FinishReason.ERROR, error_message=outcome.error_message))
            else:
                request.num_scored += len(outcome.prompt_logprobs)
                request.unreported.extend(outcome.prompt_logprobs)
                if outcome.committed:
                    committed.append(self._commit(part, outcome, now, waits))
                else:
                    # A sequence that was not ready runs its last row again: to decide, not to compute.
                    again = 1 if outcome.error is SequenceError.NOT_READY else 0
                    self._batcher.computed(request, part.num_text_rows - again, 0)
        return committed

    def reset(self, epoch: int, info: GroupInfo) -> list[Committed]:
        """The group was rebuilt: running requests start over from their committed tokens, draft sessions live on.

        Returns the ends of requests that the group does not survive, and of those that it cannot hold (normally none).
        """
        self.epoch, self.info = epoch, info
        self.counts.num_resets += 1
        guilty = group_failed([request for request in self._flight.requests if not request.ended])
        self._flight.clear()
        self._pacer.group_changed()
        self._batcher.reset(info, self.settings.max_num_seqs)
        room = min(info.max_model_len, self._batcher.num_pool_positions + 1)
        messages = {request: failure_message(request) for request in guilty}
        misfits = [request for request in self._requests if request.end_len > room and request not in messages]
        messages |= {request: f"the target group was rebuilt with room for {room} tokens only" for request in misfits}
        return [self._end(request, FinishReason.ERROR, error_message=why) for request, why in messages.items()]

    def update_settings(self, settings: SchedulerSettings) -> None:
        """Takes effect for requests added from now on."""
        self.settings = settings
        self._batcher.limit(settings.max_num_seqs)

    def draft_joined(self, draft: DraftFacts, now: float) -> None:
        """A draft worker with the group's tokenizer can be used. Joining under a known id replaces the old one."""
        self._drafts.join(draft, now)
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
        if reason is None and (request.num_speculative_tokens == 0 or not request.throttle.is_on):
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
            num_steps=self._num_steps,
            num_blocks=self._batcher.pool.num_blocks,
            num_free_blocks=self._batcher.pool.num_free,
            num_cached_blocks=self._batcher.pool.num_cached,
            prefix_cache_queries=self._batcher.num_queried_tokens,
            prefix_cache_hits=self._batcher.num_hit_tokens,
            num_preemptions=self._batcher.num_preemptions,
            num_lookup_tokens=self.counts.lookup.num_draft_tokens,
            num_lookup_accepted=self.counts.lookup.num_accepted_tokens,
            drafts=self._drafts.snapshots(),
        )

    @property
    def proposal_time(self) -> Histogram:
        """From telling a draft of a commit to its proposal; those of prefixes that it had to catch up with left out."""
        return self._drafts.proposal_time

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books do not balance."""
        check_books(self._requests, self._batcher, self._drafts, self._flight)

    @property
    def _limit_prompts(self) -> LimitPrompts | None:
        slowdown = self.settings.max_prefill_slowdown
        if not slowdown:
            return None
        return lambda rows, entering, decoding: self._pacer.most_prompt_rows(
            rows, fair_slowdown(slowdown, entering, decoding)
        )

    def _commit(self, part: Rows, outcome: SequenceResult, now: float, waits: bool) -> Committed:
        """Make a round's tokens permanent, up to where the text ends."""
        request, proposal, tokens = part.request, part.proposal, outcome.committed
        if request.trace is not None:
            request.trace.decided()
        position = len(request.text)
        ending = cut(tokens, request.end_len - position, request.end_tokens, request.cutter)
        kept = tokens[: ending.num_kept]
        accepted = min(outcome.num_accepted, len(kept))
        request.stats = counted(request.stats, proposal, outcome, len(kept))
        learn(request, proposal, part.is_lookup, outcome.num_accepted)
        if proposal is not None:
            verified = num_verified(proposal, len(tokens), len(kept))
            self.counts.verified(proposal, verified, accepted, is_lookup=part.is_lookup)
            if part.draft_id is not None:
                self._drafts.count(part.draft_id, verified, accepted)
        is_first = position == request.prompt_len
        self.counts.committed(request, len(kept), now, is_first=is_first, had_proposal=proposal is not None)
        request.text.extend(kept)
        progressed(request)
        self._batcher.computed(request, part.num_text_rows, accepted)
        proposal_id = proposal.proposal_id if proposal is not None else 0
        commit = Committed(
            request.new.request_id,
            request.new.generation,
            position,
            kept,
            proposal_id=proposal_id,
            num_accepted=accepted,
            choice=request.choice,
            logprobs=outcome.logprobs[: len(kept)],
            prompt_logprobs=tuple(request.unreported),
        )
        request.unreported = []
        if request.trace is not None:
            drafted, drafter = (len(proposal.tokens), proposal.drafter) if proposal is not None else (0, "")
            goes_on = ending.reason is None
            facts = RoundFacts(self.epoch, position, drafted, accepted, len(kept), drafter, goes_on)
            request.trace.committed(facts)
        if ending.reason is not None:
            return replace(commit, finish=self._end(request, ending.reason, ending).finish)
        if usable(request) is None:
            request.proposal = None
        num_accepted = 0 if part.is_lookup else accepted
        self._drafts.commit(request, position, proposal_id, num_accepted, now, is_waited_for=waits)
        return commit

    def _end(
        self, request: Request, reason: FinishReason, ending: Cut | None = None, error_message: str = ""
    ) -> Committed:
        """Take a request out of everything; blocks that a step in flight writes stay until that step is over."""
        self._requests.remove(request)
        self._batcher.remove(request)
        self._drafts.close(request)
        request.ended = True
        if request.trace is not None:
            request.trace.ended(reason, error_message)
        if not self._flight.carries(request):
            self._batcher.release(request)
        finish = finished(request, reason, self.info.row_invariant, ending, error_message)
        new = request.new
        return Committed(new.request_id, new.generation, len(request.text), (), finish, choice=request.choice)

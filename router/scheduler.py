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
from dataclasses import dataclass

from outrider.core.plan import GroupInfo, StepPlan, StepResult
from outrider.core.proposal import Proposal
from outrider.router.drafts import DraftEvent, DraftFacts, EvictionReason
from outrider.router.requests import Committed, Cutter, NewRequest, NoStops


def no_stops(request: NewRequest) -> Cutter:
    """The cutter of a request without stop strings."""
    return NoStops()


@dataclass(frozen=True)
class SchedulerSettings:
    """What an operator sets.

    Attributes:
        max_queue: requests that may wait beside the ``max_num_seqs`` that run.
        num_speculative_tokens: for requests that name no number of their own.
    """

    max_queue: int = 256
    max_num_seqs: int = 64
    num_speculative_tokens: int = 4


@dataclass(frozen=True)
class DraftSnapshot:
    draft_id: str
    drafter: str
    num_sessions: int
    proposal_ms: float  # from a commit to its proposal, exponentially averaged; 0 before the first
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class SchedulerSnapshot:
    epoch: int
    num_waiting: int
    num_running: int
    num_steps: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    drafts: tuple[DraftSnapshot, ...]


class Scheduler:
    """Schedules the requests of one target group, at most one step in flight."""

    def __init__(
        self,
        info: GroupInfo,
        settings: SchedulerSettings,
        *,
        epoch: int,
        make_cutter: Callable[[NewRequest], Cutter] = no_stops,
    ) -> None:
        raise NotImplementedError

    def add(self, request: NewRequest, now: float) -> None:
        """Queue a request. Raises ``InvalidRequest``, ``Overloaded`` or ``Conflict`` and then changes nothing."""
        raise NotImplementedError

    def abort(self, request_id: str, reason: str, now: float) -> Committed | None:
        """End a request at once (finish reason ABORT); its id may be used again immediately. None: no such request."""
        raise NotImplementedError

    def expire(self, now: float) -> list[Committed]:
        """End the requests whose deadline has passed (finish reason DEADLINE)."""
        raise NotImplementedError

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None: one is in flight, nothing is to do, or a short wait pays (``next_wakeup``)."""
        raise NotImplementedError

    def next_wakeup(self, now: float) -> float | None:
        """When to call ``expire`` and ``schedule`` again if nothing happens before; None: not at all."""
        raise NotImplementedError

    def complete(self, result: StepResult, now: float) -> list[Committed]:
        """Take in a step's outcome. An outcome of another epoch or step is dropped.

        Raises ``GroupError`` and changes nothing if the outcome contradicts the plan: the group must be rebuilt.
        """
        raise NotImplementedError

    def reset(self, epoch: int, info: GroupInfo) -> list[Committed]:
        """The group was rebuilt: running requests start over from their committed tokens, draft sessions live on.

        Returns the ends of requests that the rebuilt group cannot hold (normally none).
        """
        raise NotImplementedError

    def update_settings(self, settings: SchedulerSettings) -> None:
        """Takes effect for requests added from now on."""
        raise NotImplementedError

    def draft_joined(self, draft: DraftFacts, now: float) -> None:
        """A draft worker with the group's tokenizer can be used. Joining under a known id replaces the old one."""
        raise NotImplementedError

    def draft_left(self, draft_id: str, now: float) -> None:
        """The stream to a draft ended: its sessions are gone and it is told nothing more."""
        raise NotImplementedError

    def draft_events(self) -> list[DraftEvent]:
        """What is to be sent to drafts, oldest first; each event is returned once."""
        raise NotImplementedError

    def draft_proposed(self, draft_id: str, session_id: int, proposal: Proposal, now: float) -> str | None:
        """A draft's proposal. Returns why it was dropped, or None."""
        raise NotImplementedError

    def draft_evicted(self, draft_id: str, session_id: int, reason: EvictionReason, now: float) -> None:
        raise NotImplementedError

    def draft_needs_tokens(self, draft_id: str, session_id: int, from_len: int, now: float) -> None:
        """Answered by a ``DraftCommit`` with ``base_len`` = ``from_len``."""
        raise NotImplementedError

    def offer(
        self, request_id: str, generation: int, proposal: Proposal, draft_id: str, now: float
    ) -> str | None:
        """A proposal for a request, from whatever drafter. Returns why it was dropped, or None."""
        raise NotImplementedError

    def snapshot(self) -> SchedulerSnapshot:
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books do not balance."""
        raise NotImplementedError

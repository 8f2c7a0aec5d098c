"""The owner of a target group: drives its scheduler, keeps what requests produced, and survives its target and drafts.

One loop: schedule, send the plan, await the result, commit. Everything else (new requests, proposals, aborts) calls the
scheduler between those awaits, on the same event loop, and wakes the loop up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace

from outrider.cluster.registry import Registry
from outrider.core.errors import ConfigError, GroupError, NotFound, OutriderError, Unavailable
from outrider.core.plan import GroupInfo, RankReport, StepResult
from outrider.core.proposal import Proposal
from outrider.core.tracing import Tracing
from outrider.router.archive import Archive
from outrider.router.attachment import AttachmentSettings, TargetAttachment
from outrider.router.draft_pool import DraftPool
from outrider.router.drafts import DraftFacts, EvictionReason
from outrider.router.overhead import OverheadMeter, step_kind
from outrider.router.profiler import Profiler
from outrider.router.requests import Committed, Cutter, NewRequest, NoStops
from outrider.router.round_trace import RoundTraces, no_trace
from outrider.router.scheduler import Scheduler
from outrider.router.settings import SchedulerSettings
from outrider.router.target_stream import TargetStream
from outrider.router.text import StopCutter, StopMatcher
from outrider.router.tokenizer import TextTokenizer
from outrider.router.transcript import Update

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupSettings(AttachmentSettings):
    """Times, in seconds.

    Attributes:
        step_timeout_s: a step that takes longer ends the stream to the target.
        keep_s: how long the output of a finished request can still be watched.
    """

    step_timeout_s: float = 130.0
    keep_s: float = 60.0


class Group:
    """One target group and everything that runs on it. ``run`` it as a task; then ``submit`` and ``watch``.

    Requests wait for a lost target to come back; after the grace time they fail.

    Attributes:
        target: where the target is and how it is.
        ranks: what each rank reported last.
        profiler: measures what passes and drafts cost.
        overhead: what steps of requests cost beside the model's pass.
    """

    def __init__(
        self,
        registry: Registry,
        tokenizer: TextTokenizer,
        scheduler_settings: SchedulerSettings,
        settings: GroupSettings,
        *,
        scheduler_id: str,
        tracing: Tracing | None = None,
    ) -> None:
        self.target = TargetAttachment(registry, settings, scheduler_id=scheduler_id, disowned=self._disowned)
        self.ranks: tuple[RankReport, ...] = ()
        self.profiler = Profiler(self)
        self.overhead = OverheadMeter()
        self._registry = registry
        self._tokenizer = tokenizer
        self._scheduler_settings = scheduler_settings
        self._settings = settings
        self._scheduler_id = scheduler_id
        self._make_trace = RoundTraces(tracing) if tracing is not None else no_trace
        self._scheduler: Scheduler | None = None
        self._drafts: DraftPool | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._archive = Archive(lambda token: tokenizer.decode([token]))
        self._generations = itertools.count(1)
        self._wake = asyncio.Event()
        self._handed: deque[tuple[float, str]] = deque()  # when each step in flight was handed on, and its kind

    @property
    def info(self) -> GroupInfo | None:
        """What the group is; None before the first target was attached."""
        return self._scheduler.info if self._scheduler is not None else None

    @property
    def scheduler(self) -> Scheduler | None:
        return self._scheduler

    @property
    def drafts(self) -> DraftPool | None:
        return self._drafts

    @property
    def epoch(self) -> int:
        return self._scheduler.epoch if self._scheduler is not None else 0

    @property
    def num_drafts(self) -> int:
        """Drafts that can be used."""
        return len(self._scheduler.snapshot().drafts) if self._scheduler is not None else 0

    @property
    def is_attached(self) -> bool:
        return self.target.state == "ready"

    @property
    def state(self) -> str:
        """ "ready", or why requests would not be answered."""
        return self.target.state

    @property
    def is_owned(self) -> bool:
        """Whether this process has the right to schedule for the group."""
        return self.target.is_owned

    @property
    def token(self) -> int | None:
        """The fencing token of that right; None without it."""
        return self.target.token

    @property
    def num_unfinished(self) -> int:
        return self._archive.num_unfinished

    # What frontends call.

    async def submit(self, request: NewRequest) -> Update:
        """Queue a request, every choice of it. Returns where it stands: epoch, generation, position of its output.

        Raises ``InvalidRequest``, ``Overloaded``, ``Conflict`` or ``Unavailable``, and then changes nothing.
        """
        scheduler = self._scheduler
        if scheduler is None or self.target.is_given_up or not self.is_owned:
            raise Unavailable(self._why_unavailable())
        self._archive.check_free(request.request_id)
        request = replace(request, generation=next(self._generations))
        scheduler.add(request, time.monotonic())
        self._archive.open(request)
        self._wake.set()
        return Update(scheduler.epoch, request.generation, len(request.prompt_tokens), ())

    def watch(self, request_id: str, from_position: int, generation: int = 0, choice: int = 0) -> AsyncIterator[Update]:
        """What a choice commits from a position on (``Transcript.follow``). Generation 0 stands for the newest.

        Raises ``NotFound`` for a request that never was or ended more than ``keep_s`` ago.
        """
        return self._archive.find(request_id, generation, choice).follow(from_position)

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool:
        """End a request, every choice of it. False if it has ended already or never was."""
        with contextlib.suppress(NotFound):
            self._archive.find(request_id, generation)
            if not self._archive.is_finished(request_id) and self._scheduler is not None:
                committed = self._scheduler.abort(request_id, reason, time.monotonic())
                self._deliver(committed)
                self._send_to_drafts()
                self._wake.set()
                return bool(committed)
        return False

    def update_settings(self, settings: SchedulerSettings) -> None:
        """Takes effect for requests submitted from now on."""
        self._scheduler_settings = settings
        if self._scheduler is not None:
            self._scheduler.update_settings(settings)

    def fail_all(self, error: OutriderError) -> None:
        """End every request with an error."""
        now = time.monotonic()
        for request_id in self._archive.unfinished():
            if self._scheduler is not None:
                self._scheduler.abort(request_id, str(error), now)
                self._archive.fail(request_id, error, now)
        self._send_to_drafts()
        self._wake.set()

    def _disowned(self, reason: str) -> None:
        """What runs here is not known to the new owner."""
        self.fail_all(Unavailable(f"{reason}; send the request again"))

    def wake(self) -> None:
        """Look again whether there is something to do."""
        self._wake.set()

    # What drafts say (DraftListener).

    def draft_joined(self, facts: DraftFacts) -> None:
        self._scheduling.draft_joined(facts, time.monotonic())
        self._after_draft()

    def draft_left(self, draft_id: str) -> None:
        self._scheduling.draft_left(draft_id, time.monotonic())
        self._after_draft()

    def draft_proposed(self, draft_id: str, session_id: int, proposal: Proposal) -> None:
        self.profiler.proposed(draft_id, session_id, proposal)
        dropped = self._scheduling.draft_proposed(draft_id, session_id, proposal, time.monotonic())
        if dropped is not None:
            log.debug("proposal %d of draft %s was dropped: %s", proposal.proposal_id, draft_id, dropped)
        self._after_draft()

    def draft_evicted(self, draft_id: str, session_id: int, reason: EvictionReason) -> None:
        log.info("draft %s dropped session %d: %s", draft_id, session_id, reason.name)
        self._scheduling.draft_evicted(draft_id, session_id, reason, time.monotonic())
        self._after_draft()

    def draft_needs_tokens(self, draft_id: str, session_id: int, from_len: int) -> None:
        self._scheduling.draft_needs_tokens(draft_id, session_id, from_len, time.monotonic())
        self._after_draft()

    # Running.

    async def run(self) -> None:
        """Serve until cancelled; then every request that runs fails with ``Unavailable``."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._tick(), name="tick")
                self._tasks.create_task(self.target.run(self._serve), name="target")
        finally:
            self.fail_all(Unavailable("the router is shutting down; send the request again"))

    async def _tick(self) -> None:
        """Deadlines and the grace time pass even while a step runs or no target is there."""
        while True:
            await asyncio.sleep(min(0.1, self._settings.poll_s))
            now = time.monotonic()
            if self._scheduler is not None:
                self._deliver(self._scheduler.expire(now))
                self._send_to_drafts()
            if self.target.is_given_up and self.num_unfinished:
                self.fail_all(Unavailable(self._why_unavailable()))
            self._archive.forget(now - self._settings.keep_s)

    async def _serve(self, stream: TargetStream, info: GroupInfo) -> None:
        """Run steps on an attached target until its stream breaks."""
        if info.tokenizer_fingerprint != self._tokenizer.fingerprint:
            raise ConfigError(
                f"the target's tokenizer {info.tokenizer_fingerprint} is not the router's "
                f"{self._tokenizer.fingerprint}; both must read the same model folder"
            )
        scheduler = self._begin(stream.epoch, info)
        stream.when_over(self._wake.set)
        self.target.state = "ready"
        log.info("attached to %s at %s, epoch %d: %s", info.group_id, stream.address, stream.epoch, info.model)
        self._handed.clear()
        while True:
            self._wake.clear()
            stream.check()
            if not scheduler.num_in_flight:
                if await self.profiler.turn(scheduler, stream, self._settings.step_timeout_s):
                    continue
                self._advance(scheduler, stream, [])
            now = time.monotonic()
            if not scheduler.num_in_flight:
                await self._sleep_until(scheduler.next_wakeup(now), now)
                continue
            due = scheduler.ahead_at()
            result = await stream.receive(due - now if due is not None and due > now else None)
            committed = self._completed(scheduler, result) if result is not None else []
            self._advance(scheduler, stream, committed)

    def _advance(self, scheduler: Scheduler, stream: TargetStream, committed: list[Committed]) -> None:
        """Hand on the plans whose time has come, then deliver what was committed: the group is not to wait for that."""
        try:
            now = time.monotonic()
            committed += scheduler.expire(now)
            while (plan := scheduler.schedule(now)) is not None:
                self._handed.append((time.monotonic(), step_kind(plan)))
                stream.send(plan, self._settings.step_timeout_s)
        finally:
            self._deliver(committed)
            self._send_to_drafts()

    def _begin(self, epoch: int, info: GroupInfo) -> Scheduler:
        """The scheduler for a target that was just attached; running requests start over on it."""
        if self._scheduler is None:
            self._scheduler = Scheduler(
                info,
                self._scheduler_settings,
                epoch=epoch,
                make_cutter=self._make_cutter,
                make_trace=self._make_trace,
            )
        else:
            self._deliver(self._scheduler.reset(epoch, info))
        if self._drafts is None and self._tasks is not None:
            self._drafts = DraftPool(
                self._registry, self, scheduler_id=self._scheduler_id, info=info, poll_s=self._settings.poll_s
            )
            self._tasks.create_task(self._drafts.run(), name="drafts")
        if self._drafts is not None:
            self._drafts.epoch = epoch
        return self._scheduler

    def _completed(self, scheduler: Scheduler, result: StepResult) -> list[Committed]:
        try:
            committed = scheduler.complete(result, time.monotonic())
        except GroupError as error:
            # Attaching again voids what the group holds, and with it the contradiction.
            raise Unavailable(f"attaching again: {error}") from error
        handed, kind = self._handed.popleft()
        self.overhead.committed(handed, time.monotonic(), result.timing, kind)
        self.ranks = result.ranks
        if log.isEnabledFor(logging.DEBUG):
            log.debug("epoch %d step %d: %s", result.epoch, result.step, result.timing)
        return committed

    async def _sleep_until(self, wakeup: float | None, now: float) -> None:
        delay = None if wakeup is None else max(0.0, wakeup - now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._wake.wait()

    # Pieces.

    @property
    def _scheduling(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("no target was attached yet")
        return self._scheduler

    def _deliver(self, committed: Iterable[Committed]) -> None:
        now = time.monotonic()
        for item in committed:
            self._archive.deliver(self._scheduling.epoch, item, now)

    def _after_draft(self) -> None:
        self._send_to_drafts()
        self._wake.set()

    def _send_to_drafts(self) -> None:
        if self._scheduler is not None:
            for event in self._scheduler.draft_events():
                if self._drafts is not None:
                    self._drafts.send(event)

    def _make_cutter(self, request: NewRequest) -> Cutter:
        if not request.stop:
            return NoStops()
        detokenizer = self._tokenizer.detokenizer(request.prompt_tokens)
        return StopCutter(detokenizer, StopMatcher(request.stop), min_tokens=request.min_tokens)

    def _why_unavailable(self) -> str:
        return f"no target group serves this cluster ({self.target.state}); see `outrider status`, and try again later"

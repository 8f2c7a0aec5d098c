"""Carries out `outrider profile` on a running group, beside its requests and always behind them.

Passes run one at a time, and only while the scheduler has nothing to do. A request that comes waits for the pass that
runs and no longer: then everything that the profile holds in the cache is given back, and it goes on, from the context
that it was at, once the scheduler is idle again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.block_pool import BlockPool
from outrider.core.errors import Conflict, DeadlineExceeded, GenerationFailed, OutriderError, Unavailable
from outrider.core.plan import GroupInfo, SequencePlan, StepPlan
from outrider.core.proposal import Proposal
from outrider.router.profile_plans import GREEDY, Passes, ProfileSettings, Stage, StageSamples, choose_stages, passes
from outrider.router.requests import NewRequest
from outrider.router.scheduler import Scheduler
from outrider.router.target_stream import TargetStream
from outrider.router.transcript import Update

FIRST_ID = 1 << 40  # of sequences and steps: the scheduler's own count from 1
DRAFT_PROMPT = 64  # tokens of the text that drafts continue
DRAFT_TOKENS = 64  # output tokens of each of its requests
DRAFT_REQUESTS = 8  # at most: drafts may have nothing to say


class Host(Protocol):
    """The group that is measured."""

    @property
    def info(self) -> GroupInfo | None: ...

    @property
    def epoch(self) -> int: ...

    @property
    def is_attached(self) -> bool: ...

    @property
    def num_drafts(self) -> int: ...

    def wake(self) -> None: ...

    async def submit(self, request: NewRequest) -> Update: ...

    def watch(self, request_id: str, from_position: int, generation: int = 0) -> AsyncIterator[Update]: ...

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool: ...


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` measurements, over the whole profile."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class ProposalTime:
    """One proposal of a draft: its tokens, and the time that it took there."""

    draft_id: str
    num_tokens: int
    draft_ms: float


@dataclass(frozen=True)
class Profile:
    """What was measured."""

    info: GroupInfo
    epoch: int
    stages: tuple[StageSamples, ...]
    proposals: tuple[ProposalTime, ...]
    left_out: tuple[str, ...]


@dataclass
class _Job:
    """A profile that runs. ``stages`` are those that wait, the current one first."""

    stages: list[StageSamples]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: OutriderError | None = None


@dataclass
class _Hold:
    """What a stage of a profile holds of a group while it runs."""

    job: _Job
    stream: TargetStream
    pool: BlockPool
    seq_ids: list[int]
    blocks: list[list[int]]
    passes: Passes
    next: tuple[SequencePlan, ...]  # of its next pass


class Profiler:
    """Profiles of one group, one at a time. The group calls ``turn`` and ``proposed``."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._job: _Job | None = None
        self._hold: _Hold | None = None
        self._ids = itertools.count(FIRST_ID)
        self._steps = itertools.count(FIRST_ID)
        self._proposals: list[ProposalTime] | None = None
        self._last_of: set[tuple[str, int]] = set()
        self._is_running = False

    async def run(self, settings: ProfileSettings, timeout_s: float) -> AsyncGenerator[Progress | Profile]:
        """Measure; ends with the profile.

        Raises ``InvalidRequest``, ``Conflict`` while another one runs, ``Unavailable``, ``DeadlineExceeded``.
        """
        settings.check()
        if self._is_running:
            raise Conflict("a profile of this group runs already; wait until it has ended")
        info, epoch = self._host.info, self._host.epoch
        if info is None:
            raise Unavailable("no target group serves this cluster; see `outrider status`, and try again later")
        chosen, left_out = choose_stages(settings, info)
        stages = [StageSamples(stage, settings.num_runs) for stage in chosen]
        total = sum(stage.total for stage in stages) + settings.num_proposals
        self._is_running = True
        deadline = time.monotonic() + timeout_s
        done = 0
        try:
            async for stage in self._measure_passes(stages, deadline):
                done = sum(measured.done for measured in stages)
                yield Progress(stage, done, total)
            passes_done = done
            async with contextlib.aclosing(self._measure_drafts(settings.num_proposals, info, deadline)) as rounds:
                async for _ in rounds:
                    done = passes_done + min(len(self._proposals or ()), settings.num_proposals)
                    yield Progress("drafts", done, total)
            proposals = tuple((self._proposals or [])[: settings.num_proposals])
            yield Profile(info, epoch, tuple(stages), proposals, tuple(left_out))
        except TimeoutError:
            why = "requests kept the group busy, or more was asked for than that time holds"
            if not self._host.is_attached:
                why = "the target group is lost; see `outrider status`"
            raise DeadlineExceeded(f"{done} of {total} measurements were made in {timeout_s:.3g} s: {why}") from None
        finally:
            self._job = self._proposals = None
            self._is_running = False
            self._host.wake()

    async def turn(self, scheduler: Scheduler, stream: TargetStream, timeout_s: float) -> bool:
        """Run a pass if one waits and nothing else is to do; False otherwise. Between steps only.

        Raises what ``stream.step`` does; the profile has then failed too.
        """
        job, hold = self._job, self._hold
        if job is None and hold is None:
            return False
        if hold is not None and hold.stream is not stream:  # the group was attached anew: it has forgotten everything
            hold = self._hold = None
        try:
            if hold is not None and (not scheduler.is_idle or hold.job is not job):
                await self._give_back(hold, scheduler, timeout_s)
                hold = None
            if not scheduler.is_idle or job is None or job.error is not None or not job.stages:
                return False
            hold = hold or self._begin(job, scheduler, stream)
            if hold is None:
                return False
            await self._pass(job, hold, scheduler, timeout_s)
        except OutriderError as error:
            self._fail(job, error)
            raise
        except asyncio.CancelledError:
            self._fail(job, Unavailable("the router is shutting down"))
            raise
        return True

    def proposed(self, draft_id: str, session_id: int, proposal: Proposal) -> None:
        """A draft has proposed something."""
        if self._proposals is None or not proposal.tokens:
            return
        if (draft_id, session_id) in self._last_of:
            self._proposals.append(ProposalTime(draft_id, len(proposal.tokens), proposal.draft_ms))
        self._last_of.add((draft_id, session_id))  # the first proposal of a session took in the prompt

    def _fail(self, job: _Job | None, error: OutriderError) -> None:
        self._hold = None
        if job is not None:
            job.error = error
            job.changed.set()

    def _begin(self, job: _Job, scheduler: Scheduler, stream: TargetStream) -> _Hold | None:
        """Take blocks for the first stage that waits; without room for it the profile fails."""
        stage, info, pool = job.stages[0].stage, scheduler.info, scheduler.pool
        seq_ids = [next(self._ids) for _ in range(stage.num_sequences)]
        try:
            taken = pool.allocate(stage.num_sequences * stage.num_blocks(info.block_size))
        except MemoryError as error:
            room = f"the cache has no room for {stage.num_sequences} x {stage.context} positions: {error}"
            self._fail(job, Unavailable(room))
            return None
        each = len(taken) // len(seq_ids)
        blocks = [taken[start : start + each] for start in range(0, len(taken), each)]
        running = passes(job.stages[0], info, seq_ids, blocks)
        self._hold = hold = _Hold(job, stream, pool, seq_ids, blocks, running, next(running))
        return hold

    async def _pass(self, job: _Job, hold: _Hold, scheduler: Scheduler, timeout_s: float) -> None:
        plan = StepPlan(scheduler.epoch, next(self._steps), hold.next, released=scheduler.take_released())
        begun = time.perf_counter()
        result = await hold.stream.step(plan, timeout_s)
        taken_ms = 1000 * (time.perf_counter() - begun)
        fault = next((outcome.error_message for outcome in result.sequences if outcome.error is not None), None)
        try:
            if fault is not None:
                raise GenerationFailed(f"the target refuses a pass of the profile: {fault}")
            hold.next = hold.passes.send((result, taken_ms))
        except StopIteration:
            job.stages.pop(0)
            await self._give_back(hold, scheduler, timeout_s)
        except GenerationFailed as error:  # the group itself is well
            await self._give_back(hold, scheduler, timeout_s)
            job.stages.clear()
            job.error = error
        job.changed.set()

    async def _give_back(self, hold: _Hold, scheduler: Scheduler, timeout_s: float) -> None:
        """Have the group forget the sequences of a stage, then free their blocks: nobody else has them before."""
        self._hold = None
        released = (*hold.seq_ids, *scheduler.take_released())
        await hold.stream.step(StepPlan(scheduler.epoch, next(self._steps), (), released=released), timeout_s)
        for blocks in hold.blocks:
            hold.pool.release(blocks)

    async def _measure_passes(self, stages: list[StageSamples], deadline: float) -> AsyncIterator[str]:
        """Before each pass, and after the last one: which stage runs. Raises ``TimeoutError``."""
        if not stages:
            return
        self._job = job = _Job(list(stages))
        self._host.wake()
        while job.stages:
            yield _in_words(job.stages[0].stage)
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await job.changed.wait()
            job.changed.clear()
            if job.error is not None:
                raise job.error
        self._job = None
        yield _in_words(stages[-1].stage)

    async def _measure_drafts(self, wanted: int, info: GroupInfo, deadline: float) -> AsyncGenerator[None]:
        """After each commit of requests that have drafts propose. Raises ``TimeoutError``."""
        self._proposals = []
        self._last_of.clear()
        length = min(DRAFT_PROMPT, info.max_model_len // 2)
        for index in range(DRAFT_REQUESTS if self._host.num_drafts else 0):
            before = len(self._proposals)
            if before >= wanted:
                return
            request = NewRequest(
                f"profile-{uuid.uuid4().hex}",
                generation=0,
                prompt_tokens=tuple((31 * place + 7 * index + 11) % info.vocab_size for place in range(length)),
                sampling=GREEDY,
                max_tokens=min(DRAFT_TOKENS, info.max_model_len - length),
                deadline=deadline,
            )
            start = await self._host.submit(request)
            try:
                async for _ in self._host.watch(request.request_id, start.position, start.generation):
                    yield
            finally:
                await self._host.abort(request.request_id, "the profile ended", start.generation)
            if time.monotonic() >= deadline:
                raise TimeoutError
            if len(self._proposals) == before:
                return  # they have nothing to say


def _in_words(stage: Stage) -> str:
    several = f"{stage.num_sequences} x " if stage.num_sequences > 1 else ""
    return f"passes after {several}{stage.context} positions"

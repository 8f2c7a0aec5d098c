"""The leader's step thread: one plan after the other, one decision for all ranks.

Calls come from other threads (``submit``, ``reset``, ``fail``, ``stop``); the work happens in the thread. Grammars are
compiled in threads of their own from the moment a plan is submitted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from outrider.core.ahead import resolve, undecided
from outrider.core.errors import GroupError
from outrider.core.plan import SequenceResult, StepPlan, StepResult, StepTiming
from outrider.core.tracing import Tracing
from outrider.grammar import Matcher
from outrider.workers.matchers import MatcherMaker
from outrider.workers.target.channel import ChannelClosed, PlanChannel
from outrider.workers.target.codec import Message, MessageKind, encode
from outrider.workers.target.decide import decide
from outrider.workers.target.spans import record_step
from outrider.workers.target.step import Admission, RankStep, check_reports
from outrider.workers.target.times import StepTimes

log = logging.getLogger(__name__)

# How long a step waits for a grammar where no other sequence waits for the step.
GRAMMAR_PATIENCE_S = 0.05


@dataclass(frozen=True)
class _Job:
    kind: MessageKind
    plan: StepPlan | None
    received: float  # time.perf_counter() when it came
    future: Future[StepResult | None]
    matchers: Mapping[int, Future[Matcher]] = field(default_factory=dict)  # of the grammars that the plan brings


class Leader:
    """Rank 0 of a group.

    Attributes:
        failure: why the group cannot go on, or None. Once set it stays.
        steps: plans that were executed.
        times: what their parts took.
    """

    def __init__(
        self,
        step: RankStep,
        channel: PlanChannel | None,
        matcher_maker: MatcherMaker | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """``channel`` leads to the other ranks; None where there are none. ``matcher_maker`` None: no grammars."""
        self._step = step
        self._channel = channel
        self._matcher_maker = matcher_maker
        self._tracing = tracing
        self._matchers: dict[int, Future[Matcher]] = {}  # of the sequences that have a grammar, by id
        self._last: tuple[StepPlan, tuple[SequenceResult, ...]] | None = None  # for plans that were made ahead
        self._idle_since = 0.0  # time.perf_counter() when the step before was decided
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._pending: set[Future[StepResult | None]] = set()
        self._lock = threading.Lock()
        self._on_failure: list[Callable[[str], None]] = []
        self._thread = threading.Thread(target=self._run, name="target-leader", daemon=True)
        self.failure: str | None = None
        self.steps = 0
        self.times = StepTimes()

    def start(self) -> None:
        self._thread.start()

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Call back once with the reason when the group fails, from whatever thread found out; at once if it has."""
        with self._lock:
            self._on_failure.append(callback)
            failure = self.failure
        if failure is not None:
            callback(failure)

    def submit(self, plan: StepPlan) -> Future[StepResult | None]:
        """Execute a plan after those submitted before. The future fails with ``GroupError`` if the group fails."""
        return self._put(MessageKind.PLAN, plan, self._start_matchers(plan))

    def reset(self) -> Future[StepResult | None]:
        """Forget every sequence, on every rank, after the plans submitted before."""
        return self._put(MessageKind.RESET, None)

    def fail(self, message: str) -> None:
        """Stop the group for good: pending and later plans fail with ``message``. The first message stays."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = message
            pending, self._pending = self._pending, set()
            callbacks = list(self._on_failure)
        log.error("the target group failed: %s", message)
        if self._channel is not None:
            self._channel.abort()
        for future in pending:
            future.set_exception(GroupError(message))
        for callback in callbacks:
            callback(message)

    def stop(self, deadline_s: float = 3.0) -> bool:
        """End the thread and, through it, the other ranks. False where the thread is stuck in a collective."""
        if self._thread.is_alive():
            self._put(MessageKind.STOP, None)
            self._thread.join(timeout=deadline_s)
        return not self._thread.is_alive()

    def _start_matchers(self, plan: StepPlan) -> dict[int, Future[Matcher]]:
        """Begin to compile the grammars that a plan brings."""
        matchers: dict[int, Future[Matcher]] = {}
        for sequence in plan.sequences:
            grammar = sequence.sampling.grammar if sequence.sampling is not None else None
            if grammar is not None and self._matcher_maker is not None:
                matchers[sequence.seq_id] = self._matcher_maker.start(grammar)
        return matchers

    def _put(
        self, kind: MessageKind, plan: StepPlan | None, matchers: Mapping[int, Future[Matcher]] | None = None
    ) -> Future[StepResult | None]:
        job = _Job(kind, plan, time.perf_counter(), Future(), matchers or {})
        job.future.set_running_or_notify_cancel()  # a waiter that gives up must not cancel it
        with self._lock:
            if self.failure is not None and kind is not MessageKind.STOP:
                job.future.set_exception(GroupError(self.failure))
                return job.future
            self._pending.add(job.future)
        self._jobs.put(job)
        return job.future

    def _run(self) -> None:
        keep_alive_s = self._channel.keep_alive_s if self._channel is not None else None
        while True:
            try:
                job = self._jobs.get(timeout=keep_alive_s)
            except queue.Empty:
                job = _Job(MessageKind.KEEP_ALIVE, None, time.perf_counter(), Future())
            try:
                result = self._do(job)
            except ChannelClosed as error:
                self.fail(str(error))  # somebody else failed the group already; this changes nothing then
            except Exception as error:  # whatever it was, the ranks are out of step now
                log.debug("a step failed", exc_info=error)
                what = f"step {job.plan.step}" if job.plan is not None else job.kind.name.lower()
                self.fail(f"{what} failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
            else:
                self._answer(job.future, result)
                self._trace(job.plan, result)
            if job.kind is MessageKind.STOP or self.failure is not None:
                return

    def _answer(self, future: Future[StepResult | None], result: StepResult | None) -> None:
        with self._lock:
            if self.failure is not None:
                return  # fail() answered it
            self._pending.discard(future)
        future.set_result(result)

    def _trace(self, plan: StepPlan | None, result: StepResult | None) -> None:
        """Nobody waits for it: the result is out."""
        if self._tracing is not None and plan is not None and plan.traces and result is not None:
            duration_s = 1e-3 * result.timing.total_ms
            record_step(self._tracing, plan, 0, duration_s, results=result.sequences, timing=result.timing)

    def _do(self, job: _Job) -> StepResult | None:
        if job.plan is not None:
            return self._execute(job.plan, job.received, job.matchers)
        if job.kind is MessageKind.RESET:
            self._step.table.clear()
            self._matchers.clear()
            self._last = None
        if self._channel is not None and self.failure is None:
            self._channel.send(encode(Message(job.kind)))
        return None

    def _execute(self, wanted: StepPlan, received: float, matchers: Mapping[int, Future[Matcher]]) -> StepResult:
        received = max(received, self._idle_since)  # a plan that was made ahead waited for its turn
        plan = self._resolve(wanted)
        admission = self._step.admit(plan)
        self._keep_matchers(admission, matchers)
        if self._channel is not None:
            self._channel.send(encode(Message(MessageKind.PLAN, plan, admission.digest)))
        planned = time.perf_counter()
        computed = self._step.forward(admission)
        forwarded = time.perf_counter()
        exchanged = self._step.exchange(admission, computed)
        check_reports(exchanged.reports)
        sequences = decide(plan, admission, exchanged, self._matchers, self._patience_s(admission))
        self._last = (plan, sequences)
        if plan is not wanted:
            dropped = undecided(wanted, plan)
            decided_ones = iter(sequences)
            sequences = tuple(dropped.get(s.seq_id) or next(decided_ones) for s in wanted.sequences)
        self._idle_since = decided = time.perf_counter()
        self.steps += 1
        num_rows = admission.digest.num_rows
        self.times.took(planned - received, forwarded - planned, decided - forwarded, num_rows)
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            sequences=sequences,
            ranks=exchanged.reports,
            timing=StepTiming(
                total_ms=1e3 * (decided - received),
                plan_ms=1e3 * (planned - received),
                forward_ms=1e3 * (forwarded - planned),
                verify_ms=1e3 * (decided - forwarded),
            ),
        )

    def _resolve(self, plan: StepPlan) -> StepPlan:
        """The plan as every rank is to see it: with absolute positions."""
        if plan.after_step is None:
            return plan
        if self._last is None:
            raise GroupError(f"step {plan.step} was planned after step {plan.after_step}, but none ran before it")
        return resolve(plan, *self._last)

    def _keep_matchers(self, admission: Admission, started: Mapping[int, Future[Matcher]]) -> None:
        """Take over what was started for sequences that were admitted, and forget those that the table forgot."""
        for sequence in admission.admitted:
            seq_id = sequence.plan.seq_id
            if seq_id in started:
                self._matchers[seq_id] = started[seq_id]
        held = self._step.table.sequences
        for seq_id in [seq_id for seq_id in self._matchers if seq_id not in held or not held[seq_id].sampling.grammar]:
            del self._matchers[seq_id]

    def _patience_s(self, admission: Admission) -> float:
        """How long the step may wait for grammars: not at all where a sequence without one would wait too."""
        deciding = [item for item in admission.admitted if item.plan.verified_rows]
        return GRAMMAR_PATIENCE_S if all(item.sampling.grammar is not None for item in deciding) else 0.0

"""The thread of a rank that does not lead: it does what the leader hands over, until it is told to stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from outrider.core.tracing import Tracing
from outrider.workers.target.channel import ChannelClosed, PlanChannel
from outrider.workers.target.codec import MessageKind, decode
from outrider.workers.target.spans import record_step
from outrider.workers.target.step import RankStep, check_digest
from outrider.workers.target.times import StepTimes

log = logging.getLogger(__name__)


class Follower:
    """One rank above 0. It decides nothing: outcomes reach it as the next plan's ``kv_len``.

    Attributes:
        failure: why this rank cannot go on, or None. Once set it stays.
        stopped: whether the leader ended the group in peace.
        steps: plans that were executed.
        times: what their parts took.
    """

    def __init__(
        self,
        step: RankStep,
        channel: PlanChannel,
        rank: int,
        on_failure: Callable[[str], None],
        tracing: Tracing | None = None,
    ) -> None:
        """``on_failure`` is called once with the reason, from whatever thread found out."""
        self._step = step
        self._channel = channel
        self._rank = rank
        self._on_failure = on_failure
        self._tracing = tracing
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"target-rank-{rank}", daemon=True)
        self.failure: str | None = None
        self.stopped = False
        self.steps = 0
        self.times = StepTimes()

    def start(self) -> None:
        self._thread.start()

    def fail(self, message: str) -> None:
        """Stop this rank for good. The first message stays."""
        with self._lock:
            if self.failure is not None or self.stopped:
                return
            self.failure = message
        log.error("rank %d failed: %s", self._rank, message)
        self._channel.abort()
        self._on_failure(message)

    def leave(self) -> None:
        """The leader ended the group in peace."""
        self.stop()
        with self._lock:
            self.stopped = self.failure is None

    def stop(self, patience_s: float = 2.0, deadline_s: float = 3.0) -> bool:
        """End the thread. False where it is stuck in a collective.

        The leader's last word may still be on its way, so that the thread has ``patience_s`` to end by itself.
        """
        self._thread.join(timeout=patience_s)
        self._channel.abort()
        self._thread.join(timeout=deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self.failure is None and not self.stopped:
            try:
                self._follow()
            except ChannelClosed:
                return
            except Exception as error:  # whatever it was, this rank is out of step now
                log.debug("a step failed", exc_info=error)
                self.fail(f"rank {self._rank}: {type(error).__name__}: {' '.join(str(error).split())[:500]}")

    def _follow(self) -> None:
        message = decode(self._channel.receive())
        if message.plan is not None:
            started = time.perf_counter()
            admission = self._step.admit(message.plan)
            check_digest(self._rank, admission.digest, message.digest)
            planned = time.perf_counter()
            computed = self._step.forward(admission)
            forwarded = time.perf_counter()
            self._step.exchange(admission, computed)
            ended = time.perf_counter()
            self.steps += 1
            self.times.took(planned - started, forwarded - planned, ended - forwarded, admission.digest.num_rows)
            if self._tracing is not None and message.plan.traces:
                record_step(self._tracing, message.plan, self._rank, ended - started)
        elif message.kind is MessageKind.RESET:
            self._step.table.clear()
        elif message.kind is MessageKind.STOP:
            with self._lock:
                self.stopped = True

"""The plans of one stream that the leader has, and their results, in the plans' order.

Results come from the leader's thread; everything else happens in the server's event loop. Between a result and its
writing lies one hop, and while a step runs the leader may have the next plan already.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from typing import Protocol

from outrider.core.plan import StepPlan, StepResult

MOST_PLANS = 2  # that the leader has at once: further ones wait in the stream


class Steps(Protocol):
    """The part of ``Leader`` that runs plans."""

    def submit(self, plan: StepPlan) -> Future[StepResult | None]: ...
    def fail(self, message: str) -> None: ...


class Pipeline:
    """``submit`` plans, wait for their results with ``next_result``, and ``close``."""

    def __init__(self, leader: Steps, step_timeout_s: float) -> None:
        """A step that takes longer than ``step_timeout_s``, once its turn has come, fails the group."""
        self._leader = leader
        self._step_timeout_s = step_timeout_s
        self._loop = asyncio.get_running_loop()
        self._steps: deque[int] = deque()  # without a result
        self._results: deque[Future[StepResult | None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._changed: asyncio.Future[None] | None = None  # somebody waits for a result
        self._room: asyncio.Future[None] | None = None  # somebody waits for room
        self._is_over = False
        self._why: BaseException | None = None
        self._interruption: BaseException | None = None

    async def room(self) -> None:
        """Wait until another plan may be submitted."""
        while len(self._steps) >= MOST_PLANS:
            self._room = self._loop.create_future()
            await self._room

    def submit(self, plan: StepPlan) -> None:
        """Have a plan run after those before it."""
        self._steps.append(plan.step)
        if len(self._steps) == 1:
            self._set_timer()
        self._leader.submit(plan).add_done_callback(self._from_leader)

    def finish(self, why: BaseException | None = None) -> None:
        """No further plans come; once all results were taken, ``next_result`` raises ``why`` or returns None."""
        self._is_over, self._why = True, why
        _wake(self._changed)

    def interrupt(self, why: BaseException) -> None:
        """Make ``next_result`` raise ``why`` at once."""
        self._interruption = self._interruption or why
        _wake(self._changed)

    async def next_result(self) -> StepResult | None:
        """The next result, or None after the last one. Raises what the leader answers a failed step with."""
        while self._interruption is None and not self._results:
            if self._is_over and not self._steps:
                if self._why is not None:
                    raise self._why
                return None
            self._changed = self._loop.create_future()
            await self._changed
        if self._interruption is not None:
            raise self._interruption
        return self._results.popleft().result()

    def close(self) -> None:
        """Forget the deadline of the step that runs."""
        if self._timer is not None:
            self._timer.cancel()

    def _from_leader(self, future: Future[StepResult | None]) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped, and nobody waits any more
            self._loop.call_soon_threadsafe(self._arrived, future)

    def _arrived(self, future: Future[StepResult | None]) -> None:
        self._steps.popleft()
        self.close()
        if self._steps:
            self._set_timer()
        self._results.append(future)
        _wake(self._changed)
        _wake(self._room)

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(self._step_timeout_s, self._timed_out, self._steps[0])

    def _timed_out(self, step: int) -> None:
        self._leader.fail(f"step {step} took longer than step_timeout_s = {self._step_timeout_s:g}")


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)

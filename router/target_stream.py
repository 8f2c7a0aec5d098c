"""The stream of plans and results between a group's scheduler and the leader of its target group."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from outrider.core.errors import GroupError, Unavailable
from outrider.core.plan import GroupInfo, StepPlan, StepResult
from outrider.core.wire import group_info_from_wire, plan_to_wire, result_from_wire
from outrider.router.streams import BidiStream
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc


class TargetStream:
    """One attached group. Any failure ends the stream: attach again.

    Use: ``attach``, then ``step`` for one plan after the other, or ``send`` and ``receive`` where several are in
    flight, then ``close``. What waits raises ``Unavailable`` if the stream breaks or time runs out, and ``GroupError``
    if the group says that it cannot go on.
    """

    def __init__(self, address: str, *, scheduler_id: str, epoch: int) -> None:
        self.address = address
        self.epoch = epoch
        self._scheduler_id = scheduler_id
        self._stream: BidiStream[target_pb2.StepsRequest, target_pb2.StepsResponse] = BidiStream(
            address, "target", lambda channel: target_pb2_grpc.TargetServiceStub(channel).Steps
        )
        self._steps: deque[tuple[int, float]] = deque()  # in flight: number, and seconds that it may take
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None  # the newest message
        self._reading: asyncio.Future[target_pb2.StepsResponse] | None = None  # where a wait for it was given up

    async def attach(self, timeout_s: float) -> GroupInfo:
        """Become the group's scheduler; it forgets every sequence."""
        hello = target_pb2.StepsRequest(
            header=common_pb2.Header(epoch=self.epoch), attach=target_pb2.Attach(scheduler_id=self._scheduler_id)
        )
        response = await self._exchange(hello, timeout_s, "to attach")
        if response.WhichOneof("body") != "attached":
            raise GroupError(f"the {self._stream.peer} answered 'attach' with {response.WhichOneof('body')}")
        if response.header.epoch not in (0, self.epoch):
            raise GroupError(f"the {self._stream.peer} is of epoch {response.header.epoch}, not {self.epoch}")
        return group_info_from_wire(response.attached)

    async def step(self, plan: StepPlan, timeout_s: float) -> StepResult:
        """Run one step, while no other one is in flight."""
        self.send(plan, timeout_s)
        result = await self.receive()
        if result is None:
            raise RuntimeError("a wait without an end has ended")
        return result

    def send(self, plan: StepPlan, timeout_s: float) -> None:
        """Have a step run after those that were sent before; ``receive`` gets their results, and what went wrong.

        A step that takes longer than ``timeout_s``, once those before it are answered, ends the stream.
        """
        message = target_pb2.StepsRequest(header=common_pb2.Header(epoch=self.epoch), plan=plan_to_wire(plan))
        self._writing = asyncio.ensure_future(self._write(message, self._writing))
        self._steps.append((plan.step, timeout_s))
        if len(self._steps) == 1:
            self._set_timer()

    async def receive(self, timeout_s: float | None = None) -> StepResult | None:
        """The result of the oldest step in flight; None if it does not come within ``timeout_s``."""
        response = await self._read(timeout_s)
        if response is None:
            return None
        step, _ = self._steps.popleft()
        self._stop_timer()
        if self._steps:
            self._set_timer()
        if response.WhichOneof("body") == "failure":
            raise GroupError(f"the {self._stream.peer} failed: {response.failure.message}")
        if response.WhichOneof("body") != "result":
            raise GroupError(f"the {self._stream.peer} answered a plan with {response.WhichOneof('body')}")
        try:
            result = result_from_wire(response.header.epoch or self.epoch, response.result)
        except ValueError as error:
            raise Unavailable(f"the {self._stream.peer} answered step {step} with {error}") from error
        if (result.epoch, result.step) != (self.epoch, step):  # the scheduler would drop it and wait for ever
            answered = f"with step {result.step} of epoch {result.epoch}"
            raise Unavailable(f"the {self._stream.peer} answered step {step} of epoch {self.epoch} {answered}")
        return result

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once the stream is over, also while no step runs."""
        self._stream.when_over(callback)

    def check(self) -> None:
        """Raises ``Unavailable`` if the stream is over."""
        self._stream.check()

    def end(self, reason: str) -> None:
        """Make the pending and every later call raise ``Unavailable`` with this reason."""
        self._stream.end(reason)

    async def close(self) -> None:
        """Leave the group. Does not raise."""
        self._stop_timer()
        await self._stream.close()
        tasks = [task for task in (self._writing, self._reading) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)  # they end with the stream

    async def _write(self, message: target_pb2.StepsRequest, before: asyncio.Future[None] | None) -> None:
        if before is not None:
            await before  # gRPC takes one message at a time
        with contextlib.suppress(Unavailable):  # whoever reads hears of it
            await self._stream.write(message)

    async def _read(self, timeout_s: float | None) -> target_pb2.StepsResponse | None:
        if self._reading is None:
            if timeout_s is None:
                return await self._stream.read()
            self._reading = asyncio.ensure_future(self._stream.read())
        # A read that is given up ends the stream, so it goes on behind the wait.
        done, _ = await asyncio.wait([self._reading], timeout=timeout_s)
        if not done:
            return None
        reading, self._reading = self._reading, None
        return reading.result()

    def _set_timer(self) -> None:
        step, timeout_s = self._steps[0]
        reason = f"the {self._stream.peer} took more than {timeout_s:g} s for step {step}"
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._stream.end, reason)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _exchange(
        self, request: target_pb2.StepsRequest, timeout_s: float, what: str
    ) -> target_pb2.StepsResponse:
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.write(request)
                response = await self._stream.read()
        except TimeoutError as error:
            raise Unavailable(f"the {self._stream.peer} took more than {timeout_s:g} s {what}") from error
        if response.WhichOneof("body") == "failure":
            raise GroupError(f"the {self._stream.peer} failed: {response.failure.message}")
        return response

"""The stream of plans and results between a group's scheduler and the leader of its target group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.core.errors import GroupError, Unavailable
from outrider.core.plan import GroupInfo, StepPlan, StepResult
from outrider.core.wire import group_info_from_wire, plan_to_wire, result_from_wire
from outrider.router.streams import BidiStream
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc


class TargetStream:
    """One attached group. Any failure ends the stream: attach again.

    Use: ``attach``, then ``step`` for one plan after the other, then ``close``. Each raises ``Unavailable`` if the
    stream breaks or time runs out, and ``GroupError`` if the group says that it cannot go on.
    """

    def __init__(self, address: str, *, scheduler_id: str, epoch: int) -> None:
        self.address = address
        self.epoch = epoch
        self._scheduler_id = scheduler_id
        self._stream: BidiStream[target_pb2.StepsRequest, target_pb2.StepsResponse] = BidiStream(
            address, "target", lambda channel: target_pb2_grpc.TargetServiceStub(channel).Steps
        )

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
        """Run one step."""
        request = target_pb2.StepsRequest(header=common_pb2.Header(epoch=self.epoch), plan=plan_to_wire(plan))
        response = await self._exchange(request, timeout_s, f"for step {plan.step}")
        if response.WhichOneof("body") != "result":
            raise GroupError(f"the {self._stream.peer} answered a plan with {response.WhichOneof('body')}")
        try:
            result = result_from_wire(response.header.epoch or self.epoch, response.result)
        except ValueError as error:
            raise Unavailable(f"the {self._stream.peer} answered step {plan.step} with {error}") from error
        if (result.epoch, result.step) != (self.epoch, plan.step):  # the scheduler would drop it and wait for ever
            answered = f"with step {result.step} of epoch {result.epoch}"
            raise Unavailable(f"the {self._stream.peer} answered step {plan.step} of epoch {self.epoch} {answered}")
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
        await self._stream.close()

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

"""Plans and results of one stream, without a network or a leader's thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from outrider.core.errors import GroupError
from outrider.core.plan import SequencePlan, StepPlan, StepResult
from outrider.core.wire import plan_to_wire
from outrider.v1 import common_pb2, target_pb2
from outrider.workers.target.pipeline import Pipeline
from outrider.workers.target.server import TargetService, _Ended


class ByHand:
    """A leader whose steps the test ends."""

    def __init__(self) -> None:
        self.futures: list[Future[StepResult | None]] = []
        self.failure: str | None = None

    def submit(self, plan: StepPlan) -> Future[StepResult | None]:
        self.futures.append(Future())
        return self.futures[-1]

    def fail(self, message: str) -> None:
        self.failure = message
        for future in self.futures:
            if not future.done():
                future.set_exception(GroupError(message))


def plan(step: int) -> StepPlan:
    return StepPlan(1, step, (SequencePlan(1, 1, 0, (1,)),))


async def test_results_come_in_order_and_then_the_end() -> None:
    leader = ByHand()
    pipeline = Pipeline(leader, 60.0)
    for step in (1, 2):
        await pipeline.room()
        pipeline.submit(plan(step))
    waiting = asyncio.ensure_future(pipeline.room())
    pipeline.finish(RuntimeError("what came behind them"))
    for step in (1, 2):
        leader.futures[step - 1].set_result(StepResult(1, step, ()))
        result = await pipeline.next_result()
        assert result is not None
        assert result.step == step
    with pytest.raises(RuntimeError, match="what came behind them"):
        await pipeline.next_result()
    await waiting
    pipeline.close()


async def test_a_third_plan_waits() -> None:
    leader = ByHand()
    pipeline = Pipeline(leader, 60.0)
    pipeline.submit(plan(1))
    pipeline.submit(plan(2))
    waiting = asyncio.ensure_future(pipeline.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    leader.futures[0].set_result(None)
    await asyncio.wait_for(waiting, 60)
    pipeline.close()


async def test_a_step_that_takes_too_long_fails_the_group() -> None:
    leader = ByHand()
    pipeline = Pipeline(leader, 0.01)
    pipeline.submit(plan(3))
    with pytest.raises(GroupError, match=r"step 3 took longer than step_timeout_s = 0\.01"):
        await pipeline.next_result()
    pipeline.close()


async def test_an_interruption_waits_for_no_step() -> None:
    pipeline = Pipeline(ByHand(), 60.0)
    pipeline.submit(plan(1))
    waiting = asyncio.ensure_future(pipeline.next_result())
    await asyncio.sleep(0)
    pipeline.interrupt(RuntimeError("taken over"))
    with pytest.raises(RuntimeError, match="taken over"):
        await waiting
    pipeline.close()


async def test_a_plan_that_an_ended_stream_sends_in_the_same_moment_does_not_run() -> None:
    """Else it would run after the reset of the stream that took over."""
    leader: Any = ByHand()
    info: Any = None
    service = TargetService(leader, info, 1, 60.0)
    ending: asyncio.Future[_Ended] = asyncio.get_running_loop().create_future()
    service._owner = ending

    class Context:
        async def read(self) -> target_pb2.StepsRequest:
            service.end(_Ended(grpc.StatusCode.ABORTED, "taken over"))
            return target_pb2.StepsRequest(header=common_pb2.Header(epoch=1), plan=plan_to_wire(plan(1)))

    context: Any = Context()
    with pytest.raises(_Ended, match="taken over"):
        await service._run_plans(1, context, ending)
    assert leader.futures == []

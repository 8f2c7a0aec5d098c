"""The leader's gRPC side: one stream of plans and results, in a thread and event loop of its own.

The stream that attached last owns the group. It ends with a status that says why:

- FAILED_PRECONDITION: a message of an older epoch, or a plan before ``attach``; it was dropped.
- ABORTED: another stream attached.
- UNIMPLEMENTED: the plan asks for something that this group does not do; it was not run.
- INVALID_ARGUMENT: the message is not understood.
- UNAVAILABLE: the group failed; a ``GroupFailure`` came before, where the stream was attached.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.core.errors import GroupError
from outrider.core.keepalive import server_keepalive
from outrider.core.plan import GroupInfo, PlanKind, StepPlan
from outrider.core.wire import group_info_to_wire, plan_from_wire, result_to_wire
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.workers.target.leader import Leader
from outrider.workers.target.pipeline import MOST_PLANS, Pipeline

log = logging.getLogger(__name__)

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # q rows of a large plan
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    # A scheduler that vanished without closing its connection is noticed, and may find out about us in the same way.
    *server_keepalive(10_000, 5_000, allowed_ms=1_000),
)
T = TypeVar("T")
Context = grpc.aio.ServicerContext


class _Ended(Exception):
    """Why a stream ends."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """Implements ``outrider.v1.TargetService``. Lives in one event loop."""

    def __init__(self, leader: Leader, info: GroupInfo, epoch: int, step_timeout_s: float) -> None:
        self._leader = leader
        self._info = info
        self._epoch = epoch
        self._step_timeout_s = step_timeout_s
        # Set when the current stream has to end; None where no stream is attached.
        self._owner: asyncio.Future[_Ended] | None = None

    def end(self, ended: _Ended) -> None:
        """End the current stream, if any."""
        if self._owner is not None and not self._owner.done():
            self._owner.set_result(ended)

    # grpc.aio takes a coroutine that reads and writes as it likes; the name is the protocol's.
    async def Steps(  # type: ignore[override] # noqa: N802
        self, request_iterator: AsyncIterator[target_pb2.StepsRequest], context: Context
    ) -> None:
        """See target.proto."""
        ending: asyncio.Future[_Ended] = asyncio.get_running_loop().create_future()
        try:
            first = await self._read(context, ending)
            if first is None:
                return
            epoch = await self._attach(first, context, ending)
            await self._run_plans(epoch, context, ending)
        except _Ended as ended:
            if ended.code is grpc.StatusCode.UNAVAILABLE and self._owner is ending:
                failure = target_pb2.GroupFailure(message=ended.message)
                await context.write(target_pb2.StepsResponse(header=self._header(), failure=failure))
            log.info("a stream of plans ends: %s", ended.message)
            await context.abort(ended.code, ended.message)
        finally:
            if self._owner is ending:
                self._owner = None

    async def _attach(self, request: target_pb2.StepsRequest, context: Context, ending: asyncio.Future[_Ended]) -> int:
        if request.WhichOneof("body") != "attach":
            raise _Ended(grpc.StatusCode.FAILED_PRECONDITION, "the first message of a stream must be attach")
        epoch: int = request.header.epoch
        if epoch < self._epoch:
            raise _Ended(grpc.StatusCode.FAILED_PRECONDITION, self._stale(epoch))
        if self._leader.failure is not None:
            raise _Ended(grpc.StatusCode.UNAVAILABLE, f"the group failed: {self._leader.failure}")
        self.end(_Ended(grpc.StatusCode.ABORTED, f"scheduler {request.attach.scheduler_id!r} took the group over"))
        self._owner, self._epoch = ending, epoch
        # Plans of the stream before, which nobody waits for any more, run first.
        patience_s = (MOST_PLANS + 1) * self._step_timeout_s
        await self._result(self._leader.reset(), ending, "the reset at attach", patience_s)
        await context.write(target_pb2.StepsResponse(header=self._header(), attached=group_info_to_wire(self._info)))
        log.info("scheduler %r attached, epoch %d", request.attach.scheduler_id, epoch)
        return epoch

    async def _run_plans(self, epoch: int, context: Context, ending: asyncio.Future[_Ended]) -> None:
        """Answer each plan with its result, until the stream is over or has to end."""
        pipeline = Pipeline(self._leader, self._step_timeout_s)
        ending.add_done_callback(lambda done: pipeline.interrupt(done.result()))
        reader = asyncio.ensure_future(self._read_plans(epoch, context, ending, pipeline))
        try:
            while (result := await pipeline.next_result()) is not None:
                await context.write(target_pb2.StepsResponse(header=self._header(), result=result_to_wire(result)))
        except GroupError as error:
            raise _Ended(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        finally:
            pipeline.close()
            reader.cancel()

    async def _read_plans(
        self, epoch: int, context: Context, ending: asyncio.Future[_Ended], pipeline: Pipeline
    ) -> None:
        before: int | None = None
        try:
            while True:
                await pipeline.room()
                request = await context.read()
                # First: a plan that an older stream sent in this very moment must not run after the new one's reset.
                if ending.done() or not isinstance(request, target_pb2.StepsRequest):
                    break
                plan = self._plan_of(request, epoch, before)
                before = plan.step
                pipeline.submit(plan)
        except Exception as error:  # noqa: BLE001 - raised again once the results before it were written
            pipeline.finish(error)
        else:
            pipeline.finish()

    def _plan_of(self, request: target_pb2.StepsRequest, epoch: int, before: int | None) -> StepPlan:
        """The plan in a message; ``before`` is the step before it on the stream."""
        if request.header.epoch != epoch:
            raise _Ended(grpc.StatusCode.FAILED_PRECONDITION, self._stale(request.header.epoch))
        if request.WhichOneof("body") != "plan":
            raise _Ended(grpc.StatusCode.INVALID_ARGUMENT, "after attach a stream carries plans only")
        try:
            plan = plan_from_wire(epoch, request.plan)
        except ValueError as error:
            raise _Ended(grpc.StatusCode.INVALID_ARGUMENT, f"plan {request.plan.step}: {error}") from error
        unsupported = unsupported_feature(plan)
        if unsupported is not None:
            raise _Ended(grpc.StatusCode.UNIMPLEMENTED, f"plan {plan.step}: {unsupported}")
        if plan.after_step is not None and plan.after_step != before:
            which = "the first one of its stream" if before is None else f"sent after plan {before}"
            message = f"plan {plan.step}: after_step is {plan.after_step}, but the plan was {which}"
            raise _Ended(grpc.StatusCode.INVALID_ARGUMENT, message)
        return plan

    async def _result(self, future: Future[T], ending: asyncio.Future[_Ended], what: str, patience_s: float) -> T:
        """What the step thread answers. A thread that takes too long fails the group."""
        try:
            async with asyncio.timeout(patience_s):
                return await self._unless_ended(asyncio.wrap_future(future), ending)
        except TimeoutError:
            message = f"{what} took longer than {patience_s:g} s (step_timeout_s = {self._step_timeout_s:g})"
            self._leader.fail(message)
            raise _Ended(grpc.StatusCode.UNAVAILABLE, message) from None
        except GroupError as error:
            raise _Ended(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    async def _read(self, context: Context, ending: asyncio.Future[_Ended]) -> target_pb2.StepsRequest | None:
        request = await self._unless_ended(context.read(), ending)
        return request if isinstance(request, target_pb2.StepsRequest) else None  # grpc.aio.EOF

    async def _unless_ended(self, awaitable: Awaitable[T], ending: asyncio.Future[_Ended]) -> T:
        task = asyncio.ensure_future(awaitable)
        try:
            waited: set[asyncio.Future[Any]] = {task, ending}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            # First: a plan that an older stream sent in this very moment must not run after the new one's reset.
            if not ending.done():
                return task.result()
            if task.done() and not task.cancelled():
                task.exception()  # nobody else asks for it
        finally:
            task.cancel()
        raise ending.result()

    def _header(self) -> common_pb2.Header:
        return common_pb2.Header(epoch=self._epoch)

    def _stale(self, epoch: int) -> str:
        return f"a message of epoch {epoch} was dropped: the group {self._info.group_id} is at epoch {self._epoch}"


def unsupported_feature(plan: StepPlan) -> str | None:
    """What a plan asks for as a whole that this group does not do. Trees are refused for each sequence (state.py)."""
    if plan.kind is not PlanKind.VERIFY or plan.draft_layers:
        return "plans of kind draft are not supported by this group; send kind verify without draft_layers"
    if plan.feature_layers:
        return "feature_layers are not supported by this group; leave them empty"
    return None


class TargetServer:
    """Serves a leader from a thread of its own, beside the standard health and reflection services."""

    def __init__(self, leader: Leader, info: GroupInfo, epoch: int, step_timeout_s: float) -> None:
        self._leader = leader
        self._service_args = (leader, info, epoch, step_timeout_s)
        self._bound: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="target-server", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def start(self, host: str, deadline_s: float = 10.0) -> str:
        """Listen on a free port of ``host``; returns ``host:port``. Raises ``GroupError`` if that fails."""
        self._host = host
        self._thread.start()
        return self._bound.result(timeout=deadline_s)

    def stop(self, deadline_s: float = 5.0) -> bool:
        """End the streams and the thread. False if it did not end in time."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._stop.set)
            except RuntimeError:
                log.debug("the server's loop ended by itself")
            self._thread.join(timeout=deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - handed to start(), or to the group
            if not self._bound.done():
                self._bound.set_exception(GroupError(f"the leader cannot listen on {self._host}: {error}"))
            else:
                self._leader.fail(f"the leader's server ended: {error}")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        service = TargetService(*self._service_args)
        target_pb2_grpc.add_TargetServiceServicer_to_server(service, server)
        health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        for name in ("", SERVICE):
            await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
        port = server.add_insecure_port(f"{_bracketed(self._host)}:0")
        await server.start()
        failed: asyncio.Future[str] = self._loop.create_future()
        self._leader.on_failure(_from_any_thread(self._loop, failed))
        self._bound.set_result(f"{_bracketed(self._host)}:{port}")
        stop = asyncio.ensure_future(self._stop.wait())
        either: set[asyncio.Future[Any]] = {stop, failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await health_service.enter_graceful_shutdown()
        if failed.done():
            service.end(_Ended(grpc.StatusCode.UNAVAILABLE, failed.result()))
            await stop  # go on refusing, with the reason
        service.end(_Ended(grpc.StatusCode.UNAVAILABLE, "the target group is shutting down"))
        await server.stop(grace=1.0)


def _from_any_thread(loop: asyncio.AbstractEventLoop, failed: asyncio.Future[str]) -> Callable[[str], None]:
    def set_result(message: str) -> None:
        if not failed.done():
            failed.set_result(message)

    def callback(message: str) -> None:
        try:
            loop.call_soon_threadsafe(set_result, message)
        except RuntimeError:
            log.debug("the server's loop ended before the group failed: %s", message)

    return callback


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

"""The leader's gRPC side, without a leader."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from outrider.core.plan import GroupInfo
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.workers.target import server
from outrider.workers.target.server import TargetServer, TargetService, _Ended
from outrider_pings import with_quick_pings
from outrider_testbed.relay import Relay

INFO = GroupInfo("g", "m", "f", 100, 64, 10, 4, 32, 1, True, "float32")


async def test_what_an_ended_stream_sends_in_the_same_moment_does_not_count() -> None:
    """Else its plan would run after the reset of the stream that took over."""
    leader: Any = None
    info: Any = None
    service = TargetService(leader, info, 1, 1.0)
    ending: asyncio.Future[_Ended] = asyncio.get_running_loop().create_future()

    async def plan() -> str:
        service.end(_Ended(grpc.StatusCode.ABORTED, "taken over"))
        return "plan"

    service._owner = ending
    with pytest.raises(_Ended, match="taken over"):
        await service._unless_ended(plan(), ending)


async def test_a_scheduler_whose_host_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a host says nothing, not even that its connections end."""
    monkeypatch.setattr(server, "SERVER_OPTIONS", with_quick_pings(server.SERVER_OPTIONS))
    over = threading.Event()

    class Watched(TargetService):
        async def _run_plans(self, *args: Any) -> None:
            try:
                await super()._run_plans(*args)
            finally:
                over.set()

    monkeypatch.setattr(server, "TargetService", Watched)
    done: Future[None] = Future()
    done.set_result(None)
    leader: Any = SimpleNamespace(failure=None, on_failure=lambda _: None, reset=lambda: done)
    target = TargetServer(leader, INFO, 1, 60.0)
    address = target.start("127.0.0.1", deadline_s=60.0)
    try:
        with Relay(address) as relay:
            async with grpc.aio.insecure_channel(relay.address) as channel:
                call: Any = target_pb2_grpc.TargetServiceStub(channel).Steps()
                header = common_pb2.Header(epoch=1)
                await call.write(target_pb2.StepsRequest(header=header, attach=target_pb2.Attach(scheduler_id="s")))
                async with asyncio.timeout(60):
                    assert (await call.read()).WhichOneof("body") == "attached"
                relay.delay_s = (1e6, 1e6)
                # Less than gRPC's own timeout of pings.
                assert await asyncio.to_thread(over.wait, 40), "the silence of a scheduler was not noticed"
                call.cancel()
    finally:
        target.stop()

"""The leader's gRPC side, without a network."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from outrider.workers.target.server import TargetService, _Ended


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

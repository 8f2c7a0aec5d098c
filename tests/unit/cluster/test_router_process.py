"""How the supervisor starts a router."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.cluster.config import ClusterConfig
from outrider.cluster.parts import ClusterParts
from outrider.cluster.report import Reporter
from outrider.cluster.router_process import RouterProcess
from outrider.cluster.state import StateFolder
from outrider.cluster.upkeep import restart_router
from outrider.core.errors import GroupError, Unavailable
from outrider.v1 import admin_pb2, group_pb2, group_pb2_grpc


def test_the_password_of_redis_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of a machine can read the command lines of all its processes, but not their environments."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        started.append((command, env))

    monkeypatch.setattr(subprocess, "Popen", popen)
    config = ClusterConfig.model_validate({"target": {"model": "/m"}})
    url = "redis://:secret@10.0.0.1:6379/0"
    RouterProcess(config, tmp_path, url).launch()
    ((command, env),) = started
    assert "secret" not in " ".join(command)
    assert env["OUTRIDER_REDIS_URL"] == url


STALL = Unavailable("Redis does not answer")


class Members:
    """A registry that gives one answer after the other, and the last one from then on."""

    def __init__(self, *answers: dict[str, Any] | Unavailable) -> None:
        self._answers = list(answers)

    async def members(self, _: str) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Unavailable):
            raise answer
        return answer


@pytest.fixture
async def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RouterProcess]:
    """A process that runs, and does nothing else."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    router = RouterProcess(ClusterConfig.model_validate({"target": {"model": "/m"}}), tmp_path, "redis://127.0.0.1:1")
    router.launch()
    yield router
    await router.stop()


async def test_it_is_waited_for_as_long_as_it_runs(idle: RouterProcess) -> None:
    """A router is known once the target answers, which may have to load first."""
    record = {"pid": idle.pid, "address": "127.0.0.1:7", "metrics_url": "m"}
    registry: Any = Members(STALL, {}, {"router-0": {**record, "pid": 0, "address": "old"}}, {"router-0": record})
    await asyncio.wait_for(idle.wait_registered(registry, timeout_s=None), 60)
    assert (idle.address, idle.http_url, idle.metrics_url) == ("127.0.0.1:7", "", "m")
    stalled: Any = Members(STALL)
    with pytest.raises(GroupError, match=str(STALL)):
        await idle.wait_registered(stalled, timeout_s=0.0)
    with pytest.raises(RuntimeError, match="runs already"):
        idle.launch()
    await idle.stop()
    with pytest.raises(Unavailable, match="ended with status"):
        await asyncio.wait_for(idle.wait_registered(stalled, timeout_s=None), 60)


async def test_one_that_runs_is_ended_before_the_next(
    idle: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Newest(Members):
        async def members(self, _: str) -> Any:
            return {"router-0": {"pid": idle.pid, "address": "127.0.0.1:7"}}

    monkeypatch.setenv("OUTRIDER_STATE_DIR", str(tmp_path))
    config = ClusterConfig.model_validate({"target": {"model": "/m"}})
    folder = StateFolder(config.cluster)
    folder.path.mkdir()
    reporter = Reporter(os.open(os.devnull, os.O_WRONLY), as_records=False)
    parts: Any = ClusterParts.of(config, tmp_path / "settings.yaml", folder, reporter)
    parts.router, parts.registry = idle, Newest()
    first = idle._process
    assert first is not None
    await restart_router(parts)
    reporter.close()
    assert first.poll() is not None
    assert idle.running()
    assert idle.num_launches == 2


class ReadyGroup(group_pb2_grpc.GroupServiceServicer):
    async def Describe(self, request: Any, context: Any) -> group_pb2.DescribeResponse:  # noqa: N802
        return group_pb2.DescribeResponse(group=admin_pb2.GroupStatus(state="ready"))


async def test_a_stall_of_redis_is_waited_out_and_clients_ports_are_left_alone(idle: RouterProcess) -> None:
    asked: list[object] = []
    for_clients = await asyncio.start_server(lambda reader, writer: asked.append(writer), "127.0.0.1", 0)
    idle.address = f"127.0.0.1:{for_clients.sockets[0].getsockname()[1]}"
    server = grpc.aio.server()
    group_pb2_grpc.add_GroupServiceServicer_to_server(ReadyGroup(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        registry: Any = Members(STALL, {}, {"router-0": {"group_address": address}})
        await idle.wait_ready(registry, 0)
    finally:
        await server.stop(None)
        for_clients.close()
    assert asked == []

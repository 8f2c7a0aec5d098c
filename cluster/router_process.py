"""The router as a subprocess of the supervisor: start it, wait until it serves all that it should, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from outrider.cluster.config import ClusterConfig
from outrider.cluster.registry import Registry
from outrider.cluster.telemetry import quiet_core
from outrider.core.errors import ConfigError, GroupError, Unavailable

REGISTER_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 60.0
GRACE_S = 5.0  # for requests that run when it is told to stop
STOP_TIMEOUT_S = 15.0
POLL_S = 0.25


class RouterProcess:
    """One router. ``start`` may be called again after it ended; it then keeps its port if that is still free."""

    def __init__(self, config: ClusterConfig, folder: Path, redis_url: str, *, router_id: str = "router-0") -> None:
        self._config = config
        self._folder = folder
        self._redis_url = redis_url
        self._process: subprocess.Popen[bytes] | None = None
        self.router_id = router_id
        self.num_launches = 0
        self.address = ""
        self.http_url = ""
        self.metrics_url = ""

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the router was not started")
        return self._process.pid

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start the process; it does not serve yet. One that runs still must be stopped before."""
        if self.running():
            raise RuntimeError("the router runs already")
        self.num_launches += 1
        settings = self._folder / "settings.yaml"
        settings.write_text(yaml.safe_dump(self._settings().model_dump(mode="json")))
        command = [sys.executable, "-P", "-m", "outrider.router", "-f", str(settings)]
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--router-id", self.router_id, "--grace", str(GRACE_S)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for the supervisor
                env={
                    **os.environ,
                    "PYTHONSAFEPATH": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    **quiet_core(self._config),
                    "OUTRIDER_REDIS_URL": self._redis_url,  # a command line, and a password in it, is for all to read
                },
            )

    async def wait_registered(self, registry: Registry, timeout_s: float | None = REGISTER_TIMEOUT_S) -> None:
        """Wait until it announces its address, which it does once the target answers.

        Args:
            timeout_s: how long; None for as long as it runs, which is right while the target may be loading.

        Raises:
            GroupError: it takes too long.
            Unavailable: it ended.
        """
        deadline = time.monotonic() + timeout_s if timeout_s is not None else math.inf
        seen = "nothing from it in Redis"
        while True:
            try:
                record = (await registry.members("router")).get(self.router_id)
                if record is not None and record["pid"] == self.pid:
                    self.address, self.http_url = record["address"], record.get("http_url", "")
                    self.metrics_url = record.get("metrics_url", "")
                    return
            except Unavailable as error:  # Redis may come back
                seen = str(error)
            self._raise_if_ended()
            if time.monotonic() > deadline:
                raise GroupError(f"the router did not register within {timeout_s:g} s ({seen}); see {self._log_file}")
            await asyncio.sleep(0.05)

    async def wait_ready(self, registry: Registry, num_drafts: int) -> None:
        """Wait until the target group is ready and has ``num_drafts`` drafts.

        Asks where routers ask each other: there are neither keys nor TLS, of which this process holds no part.
        """
        import grpc
        import grpc.aio

        from outrider.v1 import group_pb2, group_pb2_grpc

        deadline = time.monotonic() + READY_TIMEOUT_S
        seen = "no answer"
        while True:
            try:
                async with grpc.aio.insecure_channel(await self._owner(registry)) as channel:
                    stub = group_pb2_grpc.GroupServiceStub(channel)
                    found = await stub.Describe(group_pb2.DescribeRequest(), timeout=5.0)
                drafts = [draft.state for draft in found.drafts]
                if found.group.state == "ready" and drafts.count("ready") >= num_drafts:
                    return
                refused = [state for state in (found.group.state, *drafts) if state.startswith("refused")]
                if refused:
                    raise ConfigError(f"the router {refused[0]}")
                seen = f"group {found.group.state}, drafts {drafts}"
            except grpc.aio.AioRpcError as error:
                seen = error.details() or error.code().name
            except Unavailable as error:
                seen = str(error)
            self._raise_if_ended()
            if time.monotonic() > deadline:
                raise GroupError(f"the router is not ready after {READY_TIMEOUT_S:g} s ({seen}); see {self._log_file}")
            await asyncio.sleep(0.1)

    async def _owner(self, registry: Registry) -> str:
        """Where the router that owns the group answers others: mostly this one, which is taken while none says so.

        Raises ``Unavailable`` while Redis does not say.
        """
        routers = await registry.members("router")
        owner = max(routers.values(), key=lambda record: int(record.get("group_token", 0)), default=None)
        if owner is None or not owner.get("group_token"):
            owner = routers.get(self.router_id)
        if owner is None:
            raise Unavailable("no router is registered")
        return str(owner["group_address"])

    async def watch(self) -> None:
        """Runs while the process does. Raises ``Unavailable`` when it ended."""
        while True:
            self._raise_if_ended()
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not go."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """The last line that it wrote."""
        try:
            lines = self._log_file.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        lines = [line.strip() for line in lines if line.strip()]
        last = lines[-1] if lines else ""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            last = str(json.loads(last)["message"])  # a log of JSON objects
        return last.removeprefix("outrider router: ")[:300]

    @property
    def _log_file(self) -> Path:
        return self._folder / "router.log"

    def _settings(self) -> ClusterConfig:
        router, kept = self._config.router, {}
        port = self.address.rpartition(":")[2]
        if port and not router.port:
            kept["port"] = self._free_again(int(port))
        if self.http_url and router.http_port == 0:
            kept["http_port"] = self._free_again(urlsplit(self.http_url).port or 0)
        if self.metrics_url and router.metrics_port == 0:
            kept["metrics_port"] = self._free_again(urlsplit(self.metrics_url).port or 0)
        return self._config.model_copy(update={"router": router.model_copy(update=kept)})

    def _free_again(self, port: int) -> int:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._config.router.host, port))
            except OSError:
                return 0
        return port

    def _raise_if_ended(self) -> None:
        if not self.running():
            status = self._process.poll() if self._process is not None else None
            words = self.last_words() or f"see {self._log_file}"
            raise Unavailable(f"the router ended with status {status}: {words}")

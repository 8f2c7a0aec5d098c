"""A router process, and a registry that says which target and drafts it has."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from outrider.client import Client, Unavailable
from outrider.cluster.registry import Heartbeat, Registry
from outrider_testbed.workers import Draft, Target

NUMBERS = itertools.count()
READY_TIMEOUT_S = 60.0
TTL_S = 60.0  # members stay as long as a test says, however long the machine stops for


class Cluster:
    """Use it as a context manager: inside, its router serves. Targets and drafts live on after it.

    Attributes:
        name: the cluster's name in Redis.
        address: the router's.
        router: the router's process.
    """

    def __init__(
        self,
        redis_url: str,
        folder: Path,
        target: Target,
        drafts: Mapping[str, str] | tuple[Draft, ...] = (),
        **settings: Any,
    ) -> None:
        """``drafts``: workers, or addresses by draft id. ``settings``: sections of the settings file."""
        self.name = f"testbed-{os.getpid()}-{next(NUMBERS)}"
        self.address = ""
        self.router: subprocess.Popen[bytes]
        self._redis_url = redis_url
        self._target = target
        addresses = drafts if isinstance(drafts, Mapping) else {d.draft_id: d.record["address"] for d in drafts}
        self._draft_records = {draft_id: _draft_record(draft_id, at) for draft_id, at in addresses.items()}
        self._file = folder / f"{self.name}.yaml"
        self._log_file = folder / f"{self.name}.log"
        content = {"cluster": self.name, "target": {"model": target.record["model"], "num_threads": 1}, **settings}
        self._file.write_text(yaml.safe_dump(content))
        self._heartbeats: dict[str, Heartbeat] = {}

    def __enter__(self) -> Cluster:
        self.announce("target", self._target.record["group_id"], self._target.next_record())
        for draft_id, record in self._draft_records.items():
            self.announce("draft", draft_id, record)
        try:
            self.start_router()
            self.until(lambda: self.num_ready_drafts() == len(self._draft_records), "drafts join", READY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.kill_router()
        for heartbeat in self._heartbeats.values():
            heartbeat.stop()

    def start_router(self) -> None:
        """Start a router and wait until it serves. Once more only after ``kill_router``."""
        command = [sys.executable, "-P", "-m", "outrider.router", "-f", str(self._file), "--redis", self._redis_url]
        level = os.environ.get("OUTRIDER_TESTBED_LOG_LEVEL", "INFO")
        with self._log_file.open("ab") as log:
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            self.router = subprocess.Popen([*command, "--log-level", level], stderr=log, env=environment)
        self.until(self._is_registered, "the router registers", READY_TIMEOUT_S)

    def kill_router(self) -> None:
        """SIGKILL."""
        self.router.kill()
        self.router.wait(10)

    def announce(self, kind: Any, member_id: str, record: dict[str, Any]) -> None:
        """Register a member; it stays registered until ``withdraw``."""
        heartbeat = Heartbeat(self._redis_url, self.name, kind, member_id, record, ttl_s=TTL_S)
        heartbeat.start()
        self._heartbeats[member_id] = heartbeat

    def withdraw(self, member_id: str) -> None:
        self._heartbeats.pop(member_id).stop()

    def use_drafts(self, *drafts: Draft) -> None:
        """Replace the registered drafts, and wait until the router talks to the new ones only."""
        known = self._target.record["group_id"]
        for member_id in [member_id for member_id in self._heartbeats if member_id != known]:
            self.withdraw(member_id)
        for draft in drafts:
            self.announce("draft", draft.draft_id, _draft_record(draft.draft_id, draft.record["address"]))
        wanted = {draft.draft_id: "ready" for draft in drafts}

        def changed() -> bool:
            return {draft["draft_id"]: draft["state"] for draft in self.status()["drafts"]} == wanted

        self.until(changed, f"the drafts are {wanted}", READY_TIMEOUT_S)

    def status(self) -> dict[str, Any]:
        with Client(self.address, timeout=60) as client:
            return client.status()

    def num_ready_drafts(self) -> int:
        with contextlib.suppress(Unavailable):
            return sum(draft["state"] == "ready" for draft in self.status()["drafts"])
        return -1

    def log(self) -> str:
        return self._log_file.read_text()[-4000:]

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """The first true value of ``condition``; fails where it does not come in time. Not within an event loop."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline or self.router.poll() is not None:
                raise TimeoutError(f"not within {timeout_s:g} s: {what} (router: {self.router.poll()})\n{self.log()}")
            time.sleep(0.02)
        return value

    def _is_registered(self) -> bool:
        async def members() -> dict[str, dict[str, Any]]:
            async with Registry(self._redis_url, self.name) as registry:
                return await registry.members("router")

        with contextlib.suppress(Unavailable):  # a busy machine: asked again
            for record in asyncio.run(members()).values():
                if record["pid"] == self.router.pid:
                    self.address = record["address"]
                    return True
        return False


def _draft_record(draft_id: str, address: str) -> dict[str, Any]:
    return {"draft_id": draft_id, "address": address, "model": "", "placement": "any", "node": "here", "pid": 0}

"""Target groups and drafts in processes of their own. They do not register: whoever makes a cluster registers them."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from outrider_testbed.warm import WarmPython

HOST = Path(__file__).with_name("host.py")
START_TIMEOUT_S = 240.0  # a busy machine imports torch several times at once
CALL_TIMEOUT_S = 60.0


class HostedProcess:
    """One worker's process; ``call`` runs one of its methods there."""

    def __init__(self, python: WarmPython, kind: str, settings: dict[str, Any]) -> None:
        key = secrets.token_hex(8)
        environment = {**os.environ, "OUTRIDER_TESTBED_KEY": key, "OMP_NUM_THREADS": "1"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        with Listener(family="AF_UNIX", authkey=key.encode()) as listener:
            listener._listener._socket.settimeout(START_TIMEOUT_S)  # type: ignore[attr-defined]
            self.process = python.start(
                HOST,
                [str(listener.address), kind, json.dumps(settings)],
                environment=environment,
                log=self._log,
                rank=settings.get("rank", 0),
            )
            self.connection: Connection = listener.accept()

    def call(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        self.connection.send((method, args))
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"{method} took more than {timeout_s} s\n{self.log()}")
        status, value = self.connection.recv()
        if status == "error":
            raise RuntimeError(value)
        return value

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(timeout=60)
        self.connection.close()


class Target:
    """A started target group.

    Attributes:
        record: what its leader would register.
        ranks: its processes.
    """

    def __init__(self, python: WarmPython, model: Path, world_size: int = 1, *, epoch: int = 1, **config: Any) -> None:
        values = {
            "model": str(model),
            "tensor_parallel_size": world_size,
            "num_threads": 1,
            "device": "cpu",
            "max_model_len": 512,
            **config,
        }
        settings = {"config": values, "group_id": "g0", "epoch": epoch}
        with ThreadPoolExecutor(world_size) as pool:
            self.ranks = list(
                pool.map(lambda rank: HostedProcess(python, "target", {**settings, "rank": rank}), range(world_size))
            )
            try:
                host, port = self.ranks[0].call("reserve")

                def start(rank: HostedProcess) -> dict[str, Any]:
                    facts: dict[str, Any] = rank.call("start", host, port, world_size, timeout_s=START_TIMEOUT_S)
                    return facts

                facts = list(pool.map(start, self.ranks))
            except BaseException:
                self.kill()
                raise
        names = ("group_id", "epoch", "address", "tensor_parallel_size", "ranks", "model", "dtype")
        self.record = {name: facts[0][name] for name in names}

    def next_record(self, after: int = 0) -> dict[str, Any]:
        """The record under an epoch that is newer than any that the group was attached under, and than ``after``."""
        self.record = {**self.record, "epoch": max(self.record["epoch"], after) + 1}
        return self.record

    @property
    def leader(self) -> HostedProcess:
        return self.ranks[0]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


class Draft:
    """A started draft worker."""

    def __init__(self, python: WarmPython, model: Path, draft_id: str = "d0", **config: Any) -> None:
        values = {"model": str(model), "num_threads": 1, "device": "cpu", **config}
        self.draft_id = draft_id
        self.host = HostedProcess(python, "draft", {"config": values, "draft_id": draft_id})
        try:
            facts = self.host.call("start", timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise
        self.record = {name: facts[name] for name in ("draft_id", "address", "model", "placement", "node", "pid")}

    def kill(self) -> None:
        self.host.kill()

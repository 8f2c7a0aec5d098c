"""What a running cluster leaves on disk for the command line: a lock, addresses, process ids, logs.

The folder is ``$OUTRIDER_STATE_DIR/<cluster>``, else ``$XDG_STATE_HOME/outrider/<cluster>``, else
``~/.local/state/outrider/<cluster>``. The supervisor holds an advisory lock on the file ``lock`` while it lives; the
kernel frees it however the supervisor ends, so a lock that can be taken means that nothing runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from outrider.core.errors import ConfigError, Conflict, NotFound


@dataclass(frozen=True)
class Child:
    """A process that the supervisor started. ``start_ticks`` tells it from a later one with the same number."""

    role: str
    pid: int
    start_ticks: int


@dataclass(frozen=True)
class ClusterState:
    """The addresses and processes of one running cluster."""

    cluster: str
    supervisor_pid: int
    phase: str  # "starting" or "ready"
    settings_file: str = ""
    redis_url: str = ""
    ray_address: str = ""
    router_address: str = ""
    # Where Prometheus reads; empty where that port is off.
    metrics_url: str = ""
    router_metrics_url: str = ""
    # Folders to remove once the cluster is gone.
    scratch: tuple[str, ...] = ()
    children: tuple[Child, ...] = field(default=())


def state_root() -> Path:
    """The folder that holds one folder for each cluster."""
    given = os.environ.get("OUTRIDER_STATE_DIR")
    if given:
        return Path(given).expanduser().resolve()
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "outrider"


def process_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def child_of(role: str, pid: int) -> Child:
    """The record of a process that runs. Raises ``ProcessLookupError`` if it ended already."""
    ticks = process_start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"the {role} (process {pid}) ended at once")
    return Child(role, pid, ticks)


class StateFolder:
    """The state of one cluster on disk."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.path = state_root() / cluster

    @property
    def log_file(self) -> Path:
        return self.path / "supervisor.log"

    def read(self) -> ClusterState | None:
        """What the supervisor wrote last, or None. It may be stale: see ``supervisor_pid``."""
        try:
            data: dict[str, Any] = json.loads((self.path / "state.json").read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{self.path / 'state.json'} is damaged ({error}); remove it") from error
        data["children"] = tuple(Child(**child) for child in data["children"])
        data["scratch"] = tuple(data["scratch"])
        return ClusterState(**data)

    def write(self, state: ClusterState) -> None:
        """Replace the state in one move: a reader sees the old one or the new one."""
        handle, name = tempfile.mkstemp(dir=self.path, prefix=".state-")
        with os.fdopen(handle, "w") as file:
            json.dump(dataclasses.asdict(state), file, indent=1)
        os.replace(name, self.path / "state.json")

    def supervisor_pid(self) -> int | None:
        """The process that holds the lock, or None if nothing runs."""
        try:
            with (self.path / "lock").open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(file.read() or 0)
        except FileNotFoundError:
            pass
        return None

    def require_running(self) -> ClusterState:
        """The state of a cluster that is ready. Raises ``NotFound`` in one line otherwise."""
        running = self.supervisor_pid() is not None
        state = self.read() if running else None
        if not running:
            raise NotFound(f"the cluster {self.cluster!r} is not running; start it with `outrider up`")
        if state is None or state.phase != "ready":
            raise NotFound(f"the cluster {self.cluster!r} is still starting; its log is {self.log_file}")
        return state

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Be the one supervisor of the cluster. Clears what a dead one left.

        Raises ``Conflict`` if another one lives, ``ConfigError`` if the folder cannot be written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # a Redis password may lie in it
            lock = (self.path / "lock").open("a+")
        except OSError as error:
            raise ConfigError(
                f"cannot write the state folder {self.path} ({error.strerror}); set OUTRIDER_STATE_DIR to one that can"
            ) from error
        with lock:
            self._take(lock)
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            self.clear()
            try:
                yield
            finally:
                self.clear()
                lock.truncate(0)

    def _take(self, lock: IO[str]) -> None:
        deadline = time.monotonic() + 1.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read()
                # A command that looks whether somebody holds the lock holds it for a moment, but writes no number.
                alive = holder.isdigit() and process_start_ticks(int(holder)) is not None
                if alive or time.monotonic() > deadline:
                    raise Conflict(
                        f"the cluster {self.cluster!r} is already running (process {holder or '?'}); "
                        "stop it with `outrider down` or give this one another name"
                    ) from None
                time.sleep(0.01)

    def clear(self) -> list[Child]:
        """End the processes that a dead supervisor left and forget it; call it with the lock held.

        Answers the processes that were still there.
        """
        state = self.read()
        if state is None:
            return []
        left = [child for child in state.children if process_start_ticks(child.pid) == child.start_ticks]
        for child in left:
            end_process(child.pid)
        for folder in state.scratch:
            shutil.rmtree(folder, ignore_errors=True)
        (self.path / "state.json").unlink(missing_ok=True)
        return left


def end_process(pid: int, timeout_s: float = 5.0) -> None:
    """SIGTERM, then SIGKILL if it is still there after ``timeout_s``. Does nothing if it is gone."""
    ticks = process_start_ticks(pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if ticks is None or process_start_ticks(pid) != ticks:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if wait_gone(pid, timeout_s):
            return


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Whether the process ended within ``timeout_s``; a zombie counts as ended."""
    ticks = process_start_ticks(pid)
    deadline = time.monotonic() + timeout_s
    while ticks is not None and process_start_ticks(pid) == ticks:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def running_clusters() -> list[str]:
    """Names of the clusters whose supervisor lives, in order."""
    root = state_root()
    if not root.is_dir():
        return []
    return sorted(path.parent.name for path in root.glob("*/lock") if StateFolder(path.parent.name).supervisor_pid())

"""One peer's process: started on a free port, waited for, ended."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from outrider.client import Unavailable

END_S = 10.0
LAST_LINES = 400  # characters of a log that an error repeats


def has_module(python: str, name: str) -> bool:
    """Whether that Python finds a package, without importing it."""
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    try:
        return (
            subprocess.run([python, "-P", "-c", script], capture_output=True, timeout=60, check=False).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


class PeerProcess:
    """Use it as an async context manager. ``{port}`` in the command is replaced by ``port``."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str | None]) -> None:
        """``environment``: what differs from this process's own; None takes a variable away."""
        self.name = name
        self.port = _free_port()
        self._command = [word.replace("{port}", str(self.port)) for word in command]
        changed = {**os.environ, **environment}
        self._environment = {name: value for name, value in changed.items() if value is not None}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process: subprocess.Popen[str] | None = None

    async def __aenter__(self) -> PeerProcess:
        try:
            self._process = self._start()
        except OSError as error:
            raise Unavailable(f"cannot start {self.name}: {error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._end)
        self._log.close()

    async def ready(self, path: str, timeout_s: float) -> None:
        """Wait until it answers. Raises ``Unavailable`` with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while not await asyncio.to_thread(self._answers, path):
            if self._process is None or self._process.poll() is not None:
                raise Unavailable(f"{self.name} ended before it was ready: {self._last_words()}")
            if time.monotonic() > deadline:
                raise Unavailable(f"{self.name} was not ready after {timeout_s:g} s: {self._last_words()}")
            await asyncio.sleep(0.2)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run inside, and nowhere else."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Stop it and what it started, until its turn."""
        self._signal(signal.SIGSTOP)

    def _signal(self, sign: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._environment,
            text=True,
            start_new_session=True,
        )

    def _answers(self, path: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end(self) -> None:
        """It and what it started."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGCONT)  # a stopped one would not hear that it must end
        for sign in (signal.SIGTERM, signal.SIGKILL):
            self._signal(sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)

    def _last_words(self) -> str:
        self._log.seek(0)
        return " ".join(self._log.read()[-LAST_LINES:].split()) or "it said nothing"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

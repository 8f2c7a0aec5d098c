"""Python processes that begin with the libraries of a worker imported: forked from one that imports them once.

Importing torch, transformers and DeepSpeed takes a rank ten times as long as everything else that it does to be ready.
A forked process runs its script as ``python SCRIPT ...`` would: its own arguments, environment and log, the same ending
(exit handlers, destructors, exit code). Only what libraries read from the environment while they are imported is set
once for all: one thread, the CPU.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

SERVER = Path(__file__).with_name("warm_server.py")
START_TIMEOUT_S = 240.0  # a busy machine imports torch several times at once


class WarmProcess:
    """A forked process, with what tests use of ``subprocess.Popen``."""

    def __init__(self, pid: int, ending: int) -> None:
        """``ending``: a pipe that gives the exit code as text, once there is one."""
        self.pid = pid
        self.returncode: int | None = None
        self._ending = ending

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Does nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._ending], [], [], timeout)[0]:
            text = os.read(self._ending, 16)
            os.close(self._ending)
            if not text:
                raise RuntimeError(f"nobody knows how process {self.pid} ended: its server is gone")
            self.returncode = int(text)
        return self.returncode


class WarmPython:
    """Starts scripts in warm processes. Close it at the end; processes that run then go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[bool, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def start(
        self, script: Path, arguments: Sequence[str], *, environment: Mapping[str, str], log: IO[Any], rank: int = 0
    ) -> WarmProcess:
        """Run ``python SCRIPT ARGUMENTS``, both outputs going to ``log``.

        ``rank``: rank 0 hashes strings otherwise than the rest, so that no group agrees by the order of a set only.
        """
        reading, writing = os.pipe()
        try:
            request = json.dumps({"argv": [str(script), *arguments], "environment": dict(environment)})
            with self._lock:
                channel = self._server(rank == 0)
                socket.send_fds(channel, [request.encode()], [log.fileno(), writing])
                answer = channel.recv(16)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        if not answer:
            os.close(reading)
            raise RuntimeError("the server of warm processes ended; standard error says why")
        return WarmProcess(int(answer), reading)

    def close(self) -> None:
        for server, channel in self._servers.values():
            channel.close()
            server.wait(60)

    def _server(self, leads: bool) -> socket.socket:
        if leads not in self._servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(START_TIMEOUT_S)
            with theirs:
                support = os.pathsep.join([str(SERVER.parents[1]), os.environ.get("PYTHONPATH", "")])
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "DS_ACCELERATOR": "cpu",
                    "PYTHONSAFEPATH": "1",
                    "PYTHONPATH": support.rstrip(os.pathsep),
                }
                server = subprocess.Popen(
                    [sys.executable, str(SERVER), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                )
            self._servers[leads] = (server, ours)
        return self._servers[leads][1]

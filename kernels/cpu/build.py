"""Compiles the kernels once for each Python environment, and loads them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-fopenmp", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused-parameter")
HERE = Path(__file__).parent
# What building an operator ends with where the machine cannot; a compiler that fails itself is among it.
BUILD_ERRORS = (RuntimeError, OSError, ImportError, subprocess.SubprocessError)


@contextlib.contextmanager
def build_place(operator: str) -> Iterator[None]:
    """Where torch builds an operator: this environment's folder and tools, one process of this machine at a time.

    A folder that several environments share would be compiled anew, under running processes, whenever they take turns.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    environment = hashlib.sha256(f"{sys.prefix} {sys.version} {torch.__version__}".encode()).hexdigest()[:12]
    folder = root / f"outrider-{environment}"
    folder.mkdir(parents=True, exist_ok=True)
    # Torch looks for ninja on the PATH only; a process that was not started from an activated environment lacks it.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process that holds it
        # Torch's own lock does not: left by a process that was killed while it built, it would be waited for forever.
        for stale in folder.glob(f"**/{operator}/lock"):
            stale.unlink()
        with _environment(TORCH_EXTENSIONS_DIR=str(folder), PATH=path):
            yield


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def reason_of(error: Exception) -> str:
    """One line: what the compiler found first, where it ran; its command comes before that and fills pages."""
    lines = str(error).splitlines()
    found = next((line for line in lines if "error:" in line), str(error))
    return " ".join(found.split())[:300]


@functools.cache
def build_module() -> ModuleType | None:
    """Compile or load the kernels. None where this machine cannot have them; the reason is logged, once."""
    if platform.machine() not in ("x86_64", "AMD64"):
        logger.warning("no compiled CPU kernels for %s processors: torch's take their place", platform.machine())
        return None
    from torch.utils.cpp_extension import load

    # Named by its content, so that an update never replaces a library that another process has mapped.
    content = b"".join(path.read_bytes() for path in (*sorted(HERE.glob("*.h")), HERE / "ops.cpp"))
    name = "outrider_cpu_" + hashlib.sha256(content + " ".join(FLAGS).encode()).hexdigest()[:12]
    logger.info("building the CPU kernels, unless they were built before (up to a minute)")
    try:
        with build_place(name):
            module: ModuleType = load(name, [str(HERE / "ops.cpp")], extra_cflags=list(FLAGS), verbose=False)
    except BUILD_ERRORS as error:
        logger.warning("no compiled CPU kernels, torch's take their place: %s", reason_of(error))
        return None
    if not module.instruction_sets():
        logger.warning("no compiled CPU kernels, torch's take their place: the processor lacks AVX2")
        return None
    return module

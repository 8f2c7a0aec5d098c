"""Where the kernels cannot be built, one line says so and nothing fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from outrider.kernels.cpu import instruction_sets, load_kernels
print(load_kernels(), load_kernels("avx2"), instruction_sets())
"""
SHARED_MEMORY = """
import logging
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from outrider.workers.engine.shm import build_operator
print(build_operator())
"""


def build_with(compiler: Path, folder: Path) -> str:
    """The line that says why there are no kernels; all else goes on without them."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "CXX": str(compiler)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.stdout == "None None []\n", done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "CPU kernels" in line]
    reason = line.removeprefix("no compiled CPU kernels, torch's take their place: ")
    assert reason != line
    return reason


def a_compiler(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_without_a_compiler(tmp_path: Path) -> None:
    assert build_with(tmp_path / "no-compiler", tmp_path)


def test_with_one_that_does_not_start(tmp_path: Path) -> None:
    assert "exit status 3" in build_with(a_compiler(tmp_path / "c++", "exit 3"), tmp_path)


def test_with_one_that_does_not_start_ranks_have_no_shared_memory(tmp_path: Path) -> None:
    compiler = a_compiler(tmp_path / "c++", "exit 3")
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": str(compiler), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SHARED_MEMORY],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.stdout == "False\n", done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "no shared-memory all-reduce" in line]
    assert "exit status 3" in line


def test_with_one_that_refuses_what_it_says_is_quoted(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    refuse = 'echo "ops.cpp:7:1: error: not today" >&2; exit 1'
    script = f'case "$*" in *ops.cpp*) {refuse};; *) exec {compiler} "$@";; esac'
    assert build_with(a_compiler(tmp_path / "c++", script), tmp_path) == "ops.cpp:7:1: error: not today"

"""Where the kernels cannot be built, one line says so and nothing fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from outrider.kernels.cpu import instruction_sets, load_kernels
print(load_kernels(), load_kernels("avx2"), instruction_sets())
"""


def test_without_a_compiler_there_are_no_kernels_and_one_line_of_log(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": str(tmp_path / "no-compiler")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.stdout == "None None []\n", done.stderr
    lines = [line for line in done.stderr.splitlines() if "CPU kernels" in line]
    assert len(lines) == 1, done.stderr
    assert "torch's take their place" in lines[0]

"""The kernels in Triton's interpreter, in a process of its own: it has to be chosen before Triton is imported, and must
not change what other tests see of Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.kernels.triton import missing

CHECKS = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[4]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_equal_their_definitions() -> None:
    if reason := missing():
        pytest.skip(reason)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    words = ["-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py", str(CHECKS)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout

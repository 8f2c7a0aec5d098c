"""The kernels as machine code of a GPU, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.kernels.triton import missing


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("compiling.py")), "90"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert names == {
        "_split_kernel",
        "_sum_kernel",
        "_chunk_kernel",
        "_merge_kernel",
        "_best_kernel",
        "_match_kernel",
        "_weigh_kernel",
        "_accept_kernel",
        "_residual_kernel",
        "_pick_kernel",
        "_commit_kernel",
    }
    # Products of narrow rows go to tensor cores.
    assert any(line.startswith("_split_kernel") and not line.endswith(" 0") for line in done.stdout.splitlines())
    assert any(line.startswith("_chunk_kernel") and not line.endswith(" 0") for line in done.stdout.splitlines())

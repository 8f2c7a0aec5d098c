"""`make demo` keeps its promise: real requests, figures for each verifier, nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_shows_speculation_and_leaves_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "examples" / "demo.py"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {
        row[0]: row[1:]
        for row in re.findall(r"│ (\w+) +│ +(\d+) │ +(\d+) │ +([\d.]+) │ +(\d+)% of \d+ │ +(\d+) │", done.stdout)
    }
    assert set(figures) == {"greedy", "rejection", "coupled"}
    for verifier, (tokens, calls, per_call, accepted, probability_bytes) in figures.items():
        assert int(calls) < int(tokens)
        assert float(per_call) > 1.0
        assert int(accepted) > 0
        # Probabilities travel under rejection only.
        assert (int(probability_bytes) > 0) == (verifier == "rejection")
    assert "The same text, token for token." in done.stdout
    assert "No process is left behind." in done.stdout

"""Work in a thread that ends leaves nothing of it: neither threads nor swallowed errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outrider.workers.engine.passing_thread import in_passing_thread

# In a process of its own: in this one others compute as well. Prints the threads that two ways of computing leave.
SCRIPT = """
import os, time
import torch
from outrider.workers.engine.passing_thread import in_passing_thread

def compute():
    torch.set_num_threads(2)
    return float(torch.randn(1 << 20).exp().sum())

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)  # torch makes a pool of its own for other work, once
before = threads()
in_passing_thread(compute)
deadline = time.monotonic() + 60
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
print(threads() - before)
compute()
print(threads() - before)
"""


def test_no_thread_is_left_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    passing, own = map(int, done.stdout.split())
    assert passing == 0
    assert own > 0  # a thread that goes on keeps its team


def test_what_goes_wrong_is_raised() -> None:
    assert in_passing_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_passing_thread(lambda: 1 // 0)

"""The engine can be imported and run where neither ray, redis, grpc nor deepspeed is installed."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "redis", "grpc", "deepspeed", "psutil"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.kv_cache import free_memory
from outrider.workers.engine.parallel import Parallel
import torch

assert Parallel.single().gather(torch.ones(1))[0].item() == 1
assert free_memory(torch.device("cpu")) > 0
print("imported", Engine.__name__)
"""


def test_the_engine_needs_none_of_the_services_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "imported Engine\n"), done.stderr

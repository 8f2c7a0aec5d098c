"""Compiles what runs compiled on a CPU host: our kernels, and DeepSpeed's shared-memory all-reduce for several ranks.

Otherwise the first target to start would compile them: a minute or two in which nothing seems to happen. The results
stay in torch's folder for extensions, and later calls find them there.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

import torch

from outrider.kernels.cpu import load_kernels
from outrider.workers.engine.shm import build_operator


def build(what: str, builder: Callable[[], object], otherwise: str) -> None:
    """Say what is compiled, do it, and say how it went."""
    print(f"compiling {what} (a minute or two, the first time only)", flush=True)
    started = time.monotonic()
    done = builder()
    print(f"ready after {time.monotonic() - started:.0f} s" if done else otherwise, flush=True)


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    build("the CPU kernels", load_kernels, "bfloat16 and int8 weights will be as slow as float32 ones")
    if torch.cuda.is_available():
        return 0  # ranks on GPUs use NCCL
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no other
    build(
        "DeepSpeed's shared-memory all-reduce",
        build_operator,
        "the ranks of a target will use gloo, which is much slower",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

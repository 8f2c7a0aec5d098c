"""Compiles DeepSpeed's shared-memory all-reduce, which the ranks of a target use on a CPU host.

Otherwise the first target to start would compile it: more than a minute in which nothing seems to happen. The result
stays in torch's folder for extensions, and later calls find it there.
"""

from __future__ import annotations

import logging
import os
import sys
import time

import torch

from outrider.workers.engine.shm import build_operator


def main() -> int:
    if torch.cuda.is_available():
        return 0  # ranks on GPUs use NCCL
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no other
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    print("compiling DeepSpeed's shared-memory all-reduce (a minute or two, the first time only)", flush=True)
    started = time.monotonic()
    if build_operator():
        print(f"ready after {time.monotonic() - started:.0f} s")
    else:
        print("the ranks of a target will use gloo, which is much slower")
    return 0


if __name__ == "__main__":
    sys.exit(main())

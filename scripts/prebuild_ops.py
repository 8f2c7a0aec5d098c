"""Compiles DeepSpeed's shared-memory all-reduce, which the ranks of a target use on a CPU host.

DeepSpeed would compile it when the first target starts: more than a minute in which nothing seems to happen, and one in
which every rank waits for the same lock. The result goes to torch's cache of extensions (``TORCH_EXTENSIONS_DIR``), and
later calls find it there.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time

import torch


def main() -> int:
    if torch.cuda.is_available():
        return 0  # ranks on GPUs use NCCL
    # DeepSpeed logs to stdout as it is imported.
    with contextlib.redirect_stdout(io.StringIO()):
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    if builder is None or not builder.is_compatible():
        print("DeepSpeed's shared-memory all-reduce does not fit this machine; ranks will use gloo, which is slower")
        return 0
    print("compiling DeepSpeed's shared-memory all-reduce (one or two minutes, the first time only)", flush=True)
    started = time.monotonic()
    try:
        builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        print(f"prebuild_ops: it does not compile: {error}", file=sys.stderr)
        return 1
    print(f"compiled in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""DeepSpeed's all-reduce through shared memory, for ranks of one host: microseconds, where gloo takes milliseconds.

The operator is compiled at first use and kept in torch's folder for extensions (``TORCH_EXTENSIONS_DIR``), in a part
of its own for each Python environment: one that is shared would be compiled anew, under running processes, whenever two
environments take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# DeepSpeed maps that much for each rank (struct allreduce_workspace in csrc/cpu/comm/shm.cpp).
SEGMENT_BYTES = (2 + 64) << 20
SEGMENTS = Path("/dev/shm")
# Up to this many bytes DeepSpeed adds whole buffers; beyond, it deals slices to the ranks and rounds elsewhere.
WHOLE_BUFFER_BYTES = 1 << 20
# DeepSpeed adds 16 elements at a time in one order and the remainder in another.
VECTOR = 16
MAX_RANKS = 16


@contextlib.contextmanager
def build_place(operator: str) -> Iterator[None]:
    """Where torch builds the operator: this environment's folder and tools, one process of this machine at a time."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    environment = hashlib.sha256(f"{sys.prefix} {sys.version} {torch.__version__}".encode()).hexdigest()[:12]
    folder = root / f"outrider-{environment}"
    folder.mkdir(parents=True, exist_ok=True)
    # Torch looks for ninja on the PATH only; a process that was not started from an activated environment lacks it.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process that holds it
        # Torch's own lock does not: left by a process that was killed while it built, it would be waited for forever.
        for stale in folder.glob(f"**/{operator}/lock"):
            stale.unlink()
        with _environment(TORCH_EXTENSIONS_DIR=str(folder), PATH=path):
            yield


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def build_operator() -> bool:
    """Compile or load the operator. False where this machine cannot have it; the reason is logged."""
    import deepspeed.ops
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    builder = ShareMemCommBuilder()
    logger.info("building DeepSpeed's shared-memory all-reduce, unless it was built before (up to a minute)")
    try:
        with build_place(builder.NAME), quiet():
            module = builder.load(verbose=False)
        if int(module.vector_kernel_level()) >= 1:
            return True
        logger.warning("no shared-memory all-reduce: the processor lacks AVX2")
    except (RuntimeError, OSError) as error:
        logger.warning("no shared-memory all-reduce: %s", " ".join(str(error).split())[:300])
    deepspeed.ops.__compatible_ops__[builder.NAME] = False  # or DeepSpeed would try again by itself, and fail
    return False


def prepare(device: str, local_size: int, world_size: int) -> bool:
    """Whether this rank can sum through shared memory: one host, room, and the operator, which is built if need be."""
    import deepspeed.ops
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if device == "cpu" and local_size == world_size <= MAX_RANKS and room_for_segments(local_size):
        return build_operator()
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False  # or DeepSpeed would build it for nothing
    return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what libraries print off our standard output; it goes to the debug log."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            logger.debug("%s", line)


def room_for_segments(local_size: int) -> bool:
    """Whether /dev/shm has room; without it the first touch of a segment would kill the process."""
    try:
        free = shutil.disk_usage(SEGMENTS).free
    except OSError as error:
        logger.warning("no shared-memory all-reduce: %s: %s", SEGMENTS, error.strerror)
        return False
    if free < local_size * SEGMENT_BYTES:
        logger.warning(
            "no shared-memory all-reduce: %s has %d MiB free, %d ranks want %d MiB; a larger one makes steps faster",
            SEGMENTS,
            free >> 20,
            local_size,
            local_size * SEGMENT_BYTES >> 20,
        )
        return False
    return True


def segment_path(rank: int, master_addr: str, master_port: int) -> Path:
    """Where DeepSpeed puts a rank's segment. It never removes one, so we do."""
    return SEGMENTS / f"deepspeed_allreduce_buffer_{os.getuid()}_{master_addr}_{master_port}_{rank}"


def all_reduce(tensor: Tensor, world_size: int) -> None:
    """Sum over the ranks in place, in float32; tensor contiguous and floating.

    Each element's sum is taken in the same order whatever the size of the message: with two ranks there is one order
    only; with more, the message goes in pieces that DeepSpeed adds whole, padded to full vectors.
    """
    operator = torch.ops.deepspeed.inference_all_reduce_
    if tensor.dtype != torch.float32:  # DeepSpeed adds other types with instructions that not every processor has
        wide = tensor.float()
        all_reduce(wide, world_size)
        tensor.copy_(wide)
        return
    if world_size == 2:
        operator(tensor)
        return
    flat = tensor.view(-1)
    piece = WHOLE_BUFFER_BYTES // tensor.element_size() - VECTOR
    for begin in range(0, flat.numel(), piece):
        part = flat[begin : begin + piece]
        if part.numel() % VECTOR == 0:
            operator(part)
        else:
            padded = torch.nn.functional.pad(part, (0, -part.numel() % VECTOR))
            operator(padded)
            part.copy_(padded[: part.numel()])

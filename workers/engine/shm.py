"""DeepSpeed's all-reduce through shared memory, for ranks of one host: microseconds, where gloo takes milliseconds.

The operator is compiled at first use and kept in torch's folder for extensions (``TORCH_EXTENSIONS_DIR``).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from outrider.kernels.cpu.build import BUILD_ERRORS, build_place, reason_of

logger = logging.getLogger(__name__)

# DeepSpeed maps that much for each rank (struct allreduce_workspace in csrc/cpu/comm/shm.cpp).
SEGMENT_BYTES = (2 + 64) << 20
SEGMENTS = Path("/dev/shm")
# Up to this many bytes DeepSpeed adds whole buffers; beyond, it deals slices to the ranks and rounds elsewhere.
WHOLE_BUFFER_BYTES = 1 << 20
# DeepSpeed adds 16 elements at a time in one order and the remainder in another.
VECTOR = 16
MAX_RANKS = 16


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
    except BUILD_ERRORS as error:
        logger.warning("no shared-memory all-reduce: %s", reason_of(error))
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

"""Keys and values in slots: how many blocks there are, and the tensors that hold them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.errors import ConfigError

# Share of the free memory that a cache whose size was not set may take, over all ranks of a host.
MEMORY_SHARE = 0.4
# A cache whose size was not set holds max_num_seqs sequences of this share of the context.
CONTEXT_SHARE = 8


class KVCache:
    """Slots for keys and values of every layer; block ``b`` holds slots ``b * block_size`` and on.

    The memory is not cleared: attention never looks at a slot that its sequence has not written.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks * block_size, kv_heads, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def read(self, block_table: Sequence[int], length: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the first ``length`` positions, per layer (keys, values), each [length, kv_heads, head_dim]."""
        table = torch.tensor(list(block_table), dtype=torch.int64, device=self.keys[0].device)
        slots = slots_of(table, self.block_size)[:length]
        return [
            (keys.index_select(0, slots), values.index_select(0, slots))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]


def slots_of(block_table: Tensor, block_size: int) -> Tensor:
    """block_table [n] int64 -> slots of its positions [n * block_size] int64"""
    offsets = torch.arange(block_size, device=block_table.device)
    return (block_table[:, None] * block_size + offsets[None, :]).reshape(-1)


def default_num_blocks(
    max_num_seqs: int, max_model_len: int, block_size: int, bytes_per_block: int, free_bytes: int, local_size: int
) -> int:
    """Blocks for ``max_num_seqs`` sequences of an eighth of the context, at least one whole one, within free memory."""
    wanted = max_num_seqs * -(-max_model_len // (CONTEXT_SHARE * block_size))
    whole = -(-max_model_len // block_size)
    affordable = int(free_bytes * MEMORY_SHARE) // (local_size * bytes_per_block)
    if affordable < 1:
        raise ConfigError(
            f"num_kv_blocks: {free_bytes} bytes of free memory do not hold one block of {bytes_per_block}"
        )
    return min(max(wanted, whole), affordable)


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate on a device; a container's limit counts."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _free_on_machine()
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])  # file pages that the kernel gives back when asked
    except (OSError, ValueError):
        return free  # no cgroup v2: the machine's own number stands
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _free_on_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass  # not Linux: what follows is near enough
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

"""Bookkeeping of KV cache blocks: numbers only, no tensors.

A block holds the keys and values of ``block_size`` consecutive positions of a sequence. Blocks are shared by reference
count; only full blocks of committed tokens may be shared, so no holder ever writes into a block that another one reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Hands out blocks ``0 .. num_blocks - 1``.

    ``can_allocate`` answers whether ``allocate`` would succeed; ``fork`` and ``release`` change reference counts only.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one position, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that hold ``num_positions`` positions."""
        return -(-num_positions // self.block_size)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks. Raises ``MemoryError`` and takes none if there are fewer."""
        if not self.can_allocate(count):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def fork(self, blocks: Sequence[int], num_committed: int) -> list[int]:
        """Share with a second holder the full blocks of a sequence that has ``num_committed`` committed positions.

        The partial block, if any, is the second holder's to compute anew.
        """
        shared = list(blocks[: num_committed // self.block_size])
        for block in shared:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._refs[block] += 1
        return shared

    def num_freed_by(self, blocks: Iterable[int]) -> int:
        """How many of the blocks ``release`` would free: those that have no second holder."""
        return sum(self._refs[block] == 1 for block in blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block; a block without references is free."""
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} was released twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise ``AssertionError`` unless free + held = total, and each block has one reference for each table."""
        held: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise AssertionError(f"a block appears twice in one table: {list(table)}")
            held.update(table)
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        for block in range(self.num_blocks):
            if self._refs[block] != held[block]:
                raise AssertionError(f"block {block} has {self._refs[block]} references, {held[block]} holders")
            if (block in free) != (self._refs[block] == 0):
                raise AssertionError(f"block {block} is free and held, or neither")

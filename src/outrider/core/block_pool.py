"""Bookkeeping of KV cache blocks: numbers only, no tensors.

A block holds the keys and values of ``block_size`` consecutive positions of a sequence. Blocks are shared by reference
count; only full blocks of committed tokens may be shared, so no holder ever writes into a block that another one reads.

A block may be *named* after the text that ends with it. Without a holder it then stays *cached*, so that a later
sequence with the same text finds it, until its memory is needed: the one that nobody has used for longest goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class BlockPool:
    """Hands out blocks ``0 .. num_blocks - 1``.

    ``can_allocate`` answers whether ``allocate`` would succeed; ``fork``, ``hold`` and ``release`` change reference
    counts only. Who names no block has a pool without a cache.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one position, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first
        self._refs = [0] * num_blocks
        self._names: dict[int, Hashable] = {}
        self._named: dict[Hashable, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # named blocks without a holder, least recently used first

    @property
    def num_free(self) -> int:
        """Blocks without a holder: all that ``allocate`` can give, the cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder that can still be found by name."""
        return len(self._cached)

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that hold ``num_positions`` positions."""
        return -(-num_positions // self.block_size)

    def can_allocate(self, count: int, beside: Iterable[int] = ()) -> bool:
        """Whether ``count`` blocks can be had, also after ``beside``, of which some may be cached, were held."""
        return count <= self.num_free - sum(self._refs[block] == 0 for block in beside)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks without a holder, cached ones last: those lose their names.

        Raises ``MemoryError`` and takes none if there are fewer.
        """
        if not self.can_allocate(count):
            raise MemoryError(f"{count} blocks wanted, {self.num_free} free")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def name(self, block: int, name: Hashable) -> None:
        """Let a held block, full of committed tokens, be found by a name that stands for the text up to its end.

        Where another block has that name already, that one keeps it. A block has one name as long as it is held.
        """
        if self._refs[block] == 0:
            raise ValueError(f"block {block} is free and cannot be named")
        if self._names.get(block, name) != name:
            raise ValueError(f"block {block} has another name")
        if self._named.setdefault(name, block) == block:
            self._names[block] = name

    def find(self, names: Iterable[Hashable]) -> list[int]:
        """The blocks with these names, up to the first name that no block has. Changes nothing."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that were found."""
        for block in blocks:
            if self._refs[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._cached[block]
            self._refs[block] += 1

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

    def num_shared(self, blocks: Iterable[int]) -> int:
        """How many of these held blocks others may read: those with a second holder, and those with a name."""
        return sum(self._refs[block] > 1 or block in self._names for block in blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block; a block without references is free, or cached if it has a name.

        Of blocks that become cached together, the first ones are forgotten first.
        """
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} was released twice")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._names:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise ``AssertionError`` unless free + cached + held = total, with one reference for each table of a block.

        Also if a name leads nowhere, or a block of no use to anybody is kept from being free.
        """
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
            if (block in free) + (block in self._cached) + (self._refs[block] > 0) != 1:
                raise AssertionError(f"block {block} is not one of free, cached and held")
            if block in (free if block in self._names else self._cached):
                raise AssertionError(f"block {block} is cached without a name, or free with one")
        if {name: block for block, name in self._names.items()} != self._named:
            raise AssertionError("names and blocks do not belong to each other")

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._named[self._names.pop(block)]
        return block

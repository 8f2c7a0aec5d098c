"""Named blocks: found again, shared, and forgotten in the order of their last use, against a model in plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.core.block_pool import BlockPool

NUM_BLOCKS = 7


class NamedPoolMachine(RuleBasedStateMachine):
    """Holders of chains of named blocks. The model: which name each block has, and when it last had a holder."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.tables: list[list[int]] = []
        self.names: dict[int, int] = {}
        self.order: list[int] = []  # cached blocks, the one to be forgotten next first

    @property
    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        available = NUM_BLOCKS - len(self.held)
        assert self.pool.can_allocate(count) == (count <= available)
        if count > available:
            with pytest.raises(MemoryError):
                self.pool.allocate(count)
            return
        num_unnamed = available - len(self.order)
        forgotten = self.order[: max(0, count - num_unnamed)]
        blocks = self.pool.allocate(count)
        assert not self.held & set(blocks)
        assert set(forgotten) <= set(blocks)
        assert not set(self.order[len(forgotten) :]) & set(blocks)  # no name is lost before it must be
        for block in forgotten:
            self.order.remove(block)
            del self.names[block]
        self.tables.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 5))
    def name(self, data, name: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        if self.names.get(block, name) != name:
            with pytest.raises(ValueError, match="another name"):
                self.pool.name(block, name)
            return
        self.pool.name(block, name)
        if name not in self.names.values():
            self.names[block] = name

    @rule(names=st.lists(st.integers(0, 5), max_size=3, unique=True))
    def take_over(self, names: list[int]) -> None:
        blocks = {name: block for block, name in self.names.items()}
        known = next((index for index, name in enumerate(names) if name not in blocks), len(names))
        found = self.pool.find(names)
        assert found == [blocks[name] for name in names[:known]]
        unheld = [block for block in found if block not in self.held]
        free = NUM_BLOCKS - len(self.held) - len(unheld)
        assert self.pool.can_allocate(free, beside=found)
        assert not self.pool.can_allocate(free + 1, beside=found)
        self.pool.hold(found)
        self.order = [block for block in self.order if block not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        self.order += [block for block in table if block not in self.held and block in self.names]

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == NUM_BLOCKS - len(self.held)
        assert self.pool.num_cached == len(self.order)
        for table in self.tables:
            shared = [b for b in table if b in self.names or sum(b in other for other in self.tables) > 1]
            assert self.pool.num_shared(table) == len(shared)


TestNamedPool = NamedPoolMachine.TestCase
TestNamedPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_free_blocks_are_neither_named_nor_held() -> None:
    pool = BlockPool(2, 1)
    for change in (lambda: pool.name(0, "a"), lambda: pool.hold([0])):
        with pytest.raises(ValueError, match="is free"):
            change()


def test_the_check_sees_names_that_lead_nowhere() -> None:
    pool = BlockPool(2, 1)
    table = pool.allocate(1)
    pool.name(table[0], "a")
    pool.check_integrity([table])
    del pool._named["a"]
    with pytest.raises(AssertionError, match="names and blocks"):
        pool.check_integrity([table])


def test_the_check_sees_a_block_that_is_cached_and_held() -> None:
    pool = BlockPool(2, 1)
    table = pool.allocate(1)
    pool.name(table[0], "a")
    pool._cached[table[0]] = None
    with pytest.raises(AssertionError, match="not one of free, cached and held"):
        pool.check_integrity([table])

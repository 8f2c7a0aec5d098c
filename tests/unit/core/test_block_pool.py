"""The block pool against a model: sharing, releasing, running out."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.core.block_pool import BlockPool

NUM_BLOCKS, BLOCK_SIZE = 9, 4


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[list[int]] = []

    @property
    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = NUM_BLOCKS - len(self.held)
        assert self.pool.can_allocate(count) == (count <= free)
        if count > free:
            with pytest.raises(MemoryError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not self.held & set(blocks)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data) -> None:
        table = data.draw(st.sampled_from(self.tables))
        committed = data.draw(st.integers(0, len(table) * BLOCK_SIZE))
        shared = self.pool.fork(table, committed)
        assert shared == table[: committed // BLOCK_SIZE]  # never the partial block
        self.tables.append(shared)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data) -> None:
        table = data.draw(st.sampled_from(self.tables))
        keep = data.draw(st.integers(0, len(table)))
        self.pool.release(table[keep:])
        del table[keep:]

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == NUM_BLOCKS - len(self.held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(4, 4)
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5, 16)] == [0, 1, 1, 2, 4]


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(3, 1)
    table = pool.allocate(2)
    with pytest.raises(MemoryError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity([table])


def test_releasing_twice_and_sharing_a_free_block_are_errors() -> None:
    pool = BlockPool(2, 1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(table)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.fork(table, 1)


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 0]], [[1]]])
def test_the_check_sees_wrong_books(tables) -> None:
    pool = BlockPool(3, 1)
    assert pool.allocate(1) == [0]
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 1), (1, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(num_blocks, block_size)

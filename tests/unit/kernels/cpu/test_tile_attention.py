"""Attention on AMX tiles: against its definition in float64, and the bits of each row in any company.

Blocks of 64 positions, steps of 32 and tiles of 16 have edges; so have tiles of 16 lanes, which rows straddle.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from outrider.kernels.cpu import Kernels, instruction_sets, load_kernels, plain

SHAPES = [(12, 2, 128), (14, 2, 64), (4, 4, 32), (8, 1, 96), (7, 1, 256), (20, 1, 32)]  # heads, kv_heads, head_dim
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 95, 127, 128, 129, 160, 255, 256, 257, 300, 385]


@pytest.fixture
def tiles() -> Kernels:
    found = load_kernels("amx")
    if found is None:
        pytest.skip(f"this machine has {instruction_sets() or 'no kernels'}")
    return found


@dataclass(frozen=True)
class Step:
    """Rows of a step and a cache in which slots that no row sees hold what is no number."""

    query: Tensor  # [n, heads, head_dim]
    keys: Tensor  # [slots, kv_heads, head_dim] bfloat16
    values: Tensor  # as keys
    slots: Tensor  # [total] int64
    rows: Tensor  # [n, 4] int64

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def attend(self, kernels: Kernels, chosen: list[int] | slice | None = None) -> Tensor:
        own = slice(None) if chosen is None else chosen
        return kernels.attention(self.query[own], self.keys, self.values, self.slots, self.rows[own], self.scale)

    def expected(self) -> Tensor:
        return plain.attention(self.query.double(), self.keys, self.values, self.slots, self.rows, self.scale)

    def seen(self, row: int) -> list[int]:
        first, length, start, visible = self.rows[row].tolist()
        return [first + t for t in range(length) if t < start or visible >> (t - start) & 1]

    def with_only(self, row: int) -> Step:
        """The same with no number in any slot that a row does not see."""
        hidden = torch.ones(len(self.keys), dtype=torch.bool)
        hidden[self.slots[self.seen(row)]] = False
        keys, values = self.keys.clone(), self.values.clone()
        keys[hidden], values[hidden] = float("nan"), float("-inf")
        return replace(self, keys=keys, values=values)


def tree_rows(first: int, start: int, count: int, rng: random.Random) -> list[list[int]]:
    """A random tree of ``count`` nodes after ``start`` positions."""
    bits: list[int] = []
    for index in range(count):
        parent = rng.randrange(-1, index)
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << index)
    return [[first, start + i + 1, start, value - (value >> 63 << 64)] for i, value in enumerate(bits)]


def make_step(seed: int, shape: tuple[int, int, int]) -> Step:
    """Several sequences: chunks of prompts, single rows and trees, in blocks of slots that lie anywhere."""
    heads, kv_heads, dim = shape
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows: list[list[int]] = []
    total = 0
    for _ in range(rng.randint(1, 4)):
        length, kind = rng.choice(EDGES), rng.choice(["chunk", "one", "tree"])
        count = {"chunk": rng.randint(1, min(length, 70)), "one": 1, "tree": rng.randint(1, min(length, 64))}[kind]
        if kind == "tree":
            rows += tree_rows(total, length - count, count, rng)
        else:
            lengths = range(length - count + 1, length + 1)
            rows += [[total, own, own, 0] for own in lengths]
        total += length
    block_size = rng.choice([1, 3, 16, 64])
    num_blocks = -(-total // block_size) + 2
    blocks = torch.randperm(num_blocks)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)[:total].contiguous()
    keys, values = torch.randn(2, num_blocks * block_size, kv_heads, dim).bfloat16()
    table = torch.tensor(rows)
    unused = torch.ones(len(keys), dtype=torch.bool)
    unused[slots] = False
    keys[unused], values[unused] = float("nan"), float("inf")
    return Step(torch.randn(len(rows), heads, dim), keys, values, slots, table)


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=1e-5)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Zeros of either sign and numbers that are none count as what their bits say."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_agree_with_the_definition(tiles: Kernels, shape: tuple[int, int, int]) -> None:
    for seed in range(6):
        step = make_step(seed, shape)
        check_close(step.attend(tiles), step.expected())


@pytest.mark.parametrize("length", EDGES)
def test_every_length_around_the_edges(tiles: Kernels, length: int) -> None:
    slots = torch.randperm(length + 1)[:length]
    keys, values = torch.randn(2, length + 1, 1, 64).bfloat16()
    step = Step(torch.randn(1, 3, 64), keys, values, slots, torch.tensor([[0, length, length, 0]]))
    step = step.with_only(0)
    check_close(step.attend(tiles), step.expected())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(tiles: Kernels, shape: tuple[int, int, int]) -> None:
    for seed in range(6):
        step, rng = make_step(100 + seed, shape), random.Random(seed)
        together, count = step.attend(tiles), len(step.query)
        for row in range(count):
            assert same_bits(step.attend(tiles, slice(row, row + 1))[0], together[row]), (seed, row)
        order = rng.sample(range(count), count)
        assert same_bits(step.attend(tiles, order), together[order])
        some = sorted(rng.sample(range(count), rng.randint(1, count)))
        assert same_bits(step.attend(tiles, some), together[some])
        cuts = sorted({0, count, *(rng.randrange(count) for _ in range(5))})
        for start, end in itertools.pairwise(cuts):
            assert same_bits(step.attend(tiles, slice(start, end)), together[start:end])
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert same_bits(step.attend(tiles), together)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_row_does_not_see_leaves_no_trace(tiles: Kernels, shape: tuple[int, int, int]) -> None:
    for seed in range(4):
        step, rng = make_step(200 + seed, shape), random.Random(seed)
        together = step.attend(tiles)
        for row in rng.sample(range(len(together)), min(6, len(together))):
            only = step.with_only(row)
            assert same_bits(only.attend(tiles, slice(row, row + 1))[0], together[row])
            # Its neighbours see what is no number, in the same tiles.
            assert same_bits(only.attend(tiles)[row], together[row])


def test_rows_that_see_what_is_no_number_are_the_same_alone_and_together(tiles: Kernels) -> None:
    rng = random.Random(5)
    for seed in range(12):
        step = make_step(300 + seed, (12, 2, 128))
        sick = step.slots[rng.sample(range(len(step.slots)), min(3, len(step.slots)))]
        step.values[sick[0]], step.values[sick[1:], :, ::3] = float("inf"), float("nan")
        together = step.attend(tiles)
        alone = torch.cat([step.attend(tiles, slice(row, row + 1)) for row in range(len(together))])
        assert torch.equal(together.isfinite(), alone.isfinite())
        assert torch.equal(together.nan_to_num(0.5, 1.5, 2.5), alone.nan_to_num(0.5, 1.5, 2.5))
        for row in range(len(together)):
            assert bool(together[row].isfinite().all()) != bool(
                set(step.slots[step.seen(row)].tolist()) & set(sick.tolist())
            )


def test_scores_that_rise_and_lie_far_apart(tiles: Kernels) -> None:
    """Each block brings a new maximum; what lies far below weighs nothing, and nothing overflows."""
    length = 700
    query = torch.ones(3, 2, 32)
    keys = torch.zeros(length, 1, 32).bfloat16()
    keys[:, 0, 0] = torch.linspace(-3000, 3000, length).bfloat16()
    keys[:, 0, 1] = torch.linspace(4, -4, length).bfloat16()
    values = torch.randn(length, 1, 32).bfloat16()
    query[0, :, 0], query[1, :, 0], query[2, :, 0] = 0.0, 0.01, -1.0
    rows = torch.tensor([[0, length, length, 0]] * 3)
    step = Step(query, keys, values, torch.arange(length), rows)
    check_close(step.attend(tiles), step.expected())
    assert same_bits(torch.cat([step.attend(tiles, slice(r, r + 1)) for r in range(3)]), step.attend(tiles))


def test_a_tree_of_64_rows_from_position_0(tiles: Kernels) -> None:
    """A row may see nothing of the first block of 32 positions."""
    keys, values = torch.randn(2, 64, 2, 32).bfloat16()
    rows = torch.tensor([[0, i + 1, 0, (1 << i) - (1 << i >> 63 << 64)] for i in range(64)])
    step = Step(torch.randn(64, 4, 32), keys, values, torch.randperm(64), rows)
    check_close(step.attend(tiles), step.expected())
    own = values[step.slots].float().repeat_interleave(2, dim=1).reshape(64, -1)
    assert same_bits(step.attend(tiles), own + 0.0)


def test_planted_faults_are_seen(tiles: Kernels) -> None:
    """Each of these differs from the definition or shows in the bits, so the checks above would fail."""
    rng = random.Random(2)
    rows = [[0, length, length, 0] for length in range(200, 230)] + tree_rows(230, 120, 20, rng)
    keys, values = torch.randn(2, 370, 2, 64).bfloat16()
    step = Step(torch.randn(len(rows), 14, 64), keys, values, torch.randperm(370), torch.tensor(rows))
    expected = step.expected()
    check_close(step.attend(tiles), expected)
    longer, shifted, later, swapped = (step.rows.clone() for _ in range(4))
    longer[:30, 1:3] += 1
    shifted[30:, 3] <<= 1
    later[30:, 2] += 1
    swapped[:30, 0] += 1
    for wrong in (longer, shifted, later, swapped):
        found = replace(step, rows=wrong).attend(tiles)
        with pytest.raises(AssertionError):
            check_close(found, expected)
    with pytest.raises(AssertionError):  # queries in one bfloat16
        check_close(replace(step, query=step.query.bfloat16().float()).attend(tiles), expected)


@pytest.mark.parametrize(("dim", "cache"), [(48, torch.bfloat16), (80, torch.bfloat16), (64, torch.float32)])
def test_what_does_not_fit_tiles_goes_the_other_way(tiles: Kernels, dim: int, cache: torch.dtype) -> None:
    step = make_step(7, (4, 2, dim))
    step = replace(step, keys=step.keys.to(cache), values=step.values.to(cache))
    other = load_kernels("avx512")
    assert other is not None
    check_close(step.attend(tiles), step.expected())
    assert same_bits(step.attend(tiles), step.attend(other))
    fitting = make_step(7, (4, 2, 64))
    assert not same_bits(fitting.attend(tiles), fitting.attend(other))

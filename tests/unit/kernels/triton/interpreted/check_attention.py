"""Attention of chains and trees against the definition in float64, each row's bits, and planted bugs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outrider.kernels.cpu import plain
from outrider.kernels.triton import attention as paged
from outrider.kernels.triton.buffers import CHUNK, AttentionBuffers

from .planting import planted


@dataclass(frozen=True)
class Case:
    query: torch.Tensor  # [n, heads, head_dim]
    keys: torch.Tensor  # [slots, kv_heads, head_dim]
    values: torch.Tensor
    slots: torch.Tensor  # [total]
    rows: torch.Tensor  # [n, 4]


def tree_bits(parents: list[int]) -> list[int]:
    """Which nodes each node of a tree sees: its ancestors and itself, as a signed number. A parent of -1 is the
    committed text."""
    bits: list[int] = []
    for index, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << index)
    return [value - (value >> 63 << 64) for value in bits]


def case_of(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, cache: torch.dtype) -> Case:
    """Rows of a chain at several lengths and a tree, with rubbish in slots that nobody sees."""
    generator = torch.Generator().manual_seed(dim)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    keys, values = numbers(600, kv_heads, dim).to(cache), numbers(600, kv_heads, dim).to(cache)
    free = torch.randperm(600, generator=generator)
    chain, tree = free[:300], free[300 : 300 + CHUNK + 4]
    keys[free[300 + len(tree) :]], values[free[300 + len(tree) :]] = float("nan"), float("inf")
    parents = [-1, 0, 0, 1, 2, 4, -1, 6, 3, 0]
    start = len(tree) - len(parents)  # so that the tree lies in two chunks
    rows = [[0, length, length, 0] for length in (1, 64, CHUNK + 1, 270)]
    rows += [[len(chain), start + index + 1, start, bits] for index, bits in enumerate(tree_bits(parents))]
    query = numbers(len(rows), heads, dim).to(dtype)
    return Case(query, keys, values, torch.cat([chain, tree]), torch.tensor(rows))


def run(case: Case, module: ModuleType = paged, max_context: int = 512) -> torch.Tensor:
    n, heads, dim = case.query.shape
    buffers = AttentionBuffers.allocate(heads, dim, max_context, len(case.slots), case.query.dtype, "cpu")
    buffers.partial.fill_(float("nan"))
    buffers.query[:n], buffers.slots[:], buffers.rows[:n] = case.query, case.slots, case.rows
    longest = max(1, int(case.rows[:, 1].max()))
    found: torch.Tensor = module.attention(buffers, n, longest, case.keys, case.values, dim**-0.5).clone()
    assert not bool(buffers.out[n:].any()), "rows of length 0 give 0"
    return found


def assert_is_attention(case: Case, found: torch.Tensor) -> None:
    scale = case.query.shape[2] ** -0.5
    expected = plain.attention(case.query.double(), case.keys, case.values, case.slots, case.rows, scale)
    if case.query.dtype == torch.float32:
        tolerance = 1e-5
    else:
        # Shares and results are rounded to the rows' type: each share by half of eps, and the result once more.
        largest = float(case.values[case.values.isfinite()].abs().max())
        tolerance = torch.finfo(case.query.dtype).eps * largest
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "cache"),
    [
        (6, 2, 128, torch.float32, torch.float32),
        (7, 1, 80, torch.float32, torch.bfloat16),
        (4, 2, 48, torch.bfloat16, torch.bfloat16),
        (18, 1, 64, torch.bfloat16, torch.bfloat16),
        (2, 2, 16, torch.float16, torch.float16),
    ],
)
def test_attention_of_chains_and_trees(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, cache: torch.dtype
) -> None:
    case = case_of(heads, kv_heads, dim, dtype, cache)
    assert_is_attention(case, run(case))


def check_company(module: ModuleType = paged) -> None:
    case = case_of(2, 1, 48, torch.float32, torch.bfloat16)
    found = run(case, module)
    n = len(case.rows)
    for row in (0, 3, n - 1):
        own = slice(row, row + 1)
        alone = Case(case.query[own], case.keys, case.values, case.slots, case.rows[own])
        assert torch.equal(run(alone, module, max_context=1024)[0], found[row])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).repeat(2)[:17]
    many = Case(case.query[order], case.keys, case.values, case.slots, case.rows[order])
    assert torch.equal(run(many, module), found[order])


def test_a_rows_bits_do_not_depend_on_its_company() -> None:
    check_company()


def test_a_tree_of_64_rows() -> None:
    generator = torch.Generator().manual_seed(64)
    keys, values = (torch.randn(80, 1, 16, generator=generator) for _ in range(2))
    query = torch.randn(64, 2, 16, generator=generator)
    parents = [-1, *(int(torch.randint(0, index, (), generator=generator)) for index in range(1, 64))]
    bits = tree_bits(parents)
    assert bits[63] < 0, "the last node's own bit is the sign"
    rows = torch.tensor([[0, 16 + index + 1, 16, value] for index, value in enumerate(bits)])
    case = Case(query, keys, values, torch.arange(80), rows)
    assert_is_attention(case, run(case))


def test_a_chunk_of_which_nothing_is_seen_changes_nothing() -> None:
    """A tree that begins on a chunk's border, and a node whose ancestors lie before it."""
    case = case_of(4, 2, 16, torch.float32, torch.float32)
    rows = torch.tensor([[0, CHUNK + 10, CHUNK, 0], [0, CHUNK, CHUNK, 0], [0, 2 * CHUNK + 1, 2 * CHUNK, 1]])
    found = run(Case(case.query[:1].repeat(3, 1, 1), case.keys, case.values, case.slots, rows))
    assert torch.equal(found[0], found[1])


def test_what_does_not_fit_is_refused() -> None:
    buffers = AttentionBuffers.allocate(4, 16, 256, 300, torch.bfloat16, "cpu")
    cache = torch.zeros(10, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="at most 64"):
        paged.attention(buffers, 65, 1, cache, cache, 1.0)
    with pytest.raises(ValueError, match="the buffers hold 256"):
        paged.attention(buffers, 1, 257, cache, cache, 1.0)
    with pytest.raises(ValueError, match="do not fit 4 heads"):
        paged.attention(buffers, 1, 1, cache[:, :, :8], cache[:, :, :8], 1.0)
    with pytest.raises(ValueError, match="do not go with"):
        paged.attention(buffers, 1, 1, cache.float(), cache.float(), 1.0)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(visible >> bit) & 1", "(visible >> (bit + 1)) & 1"),
        ("t < step_start", "t <= step_start"),
        ("tl.maximum(t - step_start, 0), 63)", "tl.maximum(t - step_start, 0), 7)"),
        ("seen = (t < end)", "seen = (t < end - 1)"),
        ("(slot * kv_heads + kv_head)", "(slot * kv_heads)"),
        ("tl.load(slots + first + t,", "tl.load(slots + t,"),
        ("more * added[:, None]", "more"),
        ("for index in range(0, tl.cdiv(length, chunk))", "for index in range(0, length // chunk)"),
    ],
)
def test_planted_bugs_are_caught(tmp_path: Path, right: str, wrong: str) -> None:
    case = case_of(2, 2, 16, torch.float32, torch.float32)
    module = planted(tmp_path, paged, right, wrong)
    with pytest.raises(AssertionError):
        assert_is_attention(case, run(case, module))


def test_a_split_that_depends_on_the_step_is_caught(tmp_path: Path) -> None:
    """The same sums, in blocks that are chosen by the number of rows."""
    module = planted(tmp_path, paged, "block=_BLOCK,", "block=_BLOCK if num_rows < 3 else 32,")
    case = case_of(2, 1, 48, torch.float32, torch.bfloat16)
    assert_is_attention(case, run(case, module))
    with pytest.raises(AssertionError):
        check_company(module)

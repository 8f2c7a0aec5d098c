"""Products against the definition in float64, each row's bits in any company, and planted bugs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from outrider.kernels.cpu import Weights, plain, quantize_int8
from outrider.kernels.triton import linear as product

from .planting import planted

# One split and several, ends inside a block, and a matrix smaller than a block.
SHAPES = [(70, 330), (33, 34), (16, 1100)]
FORMATS = ["bfloat16", "float16", "int8", "int8 in groups of 32", "int8 in groups of 64"]


def weights_of(shape: tuple[int, int], form: str) -> tuple[Weights, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    weight = 0.1 * torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    if form in ("bfloat16", "float16"):
        return Weights(weight.to(getattr(torch, form))), bias
    return quantize_int8(weight, int(form.rpartition(" ")[2]) if "groups" in form else None), bias


def rows_of(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count)).to(dtype)


def on_device(weights: Weights, module: ModuleType = product) -> product.LinearWeights:
    found: product.LinearWeights = module.LinearWeights(weights.values, weights.scales, weights.group_size)
    return found


def run(rows: torch.Tensor, weights: Weights, bias: torch.Tensor | None, module: ModuleType = product) -> torch.Tensor:
    ready = on_device(weights, module)
    buffers = module.allocate(ready, rows.dtype)
    buffers.x.fill_(float("nan"))  # rows behind those that count may hold anything
    buffers.x[: len(rows)] = rows
    return module.linear(buffers, len(rows), ready, bias).clone()


def assert_is_product(rows: torch.Tensor, weights: Weights, bias: torch.Tensor | None, found: torch.Tensor) -> None:
    """Within the error of float32 sums, and of the rounding of the result to the rows' type."""
    dense, wide = weights.dense().double(), rows.double()
    expected = plain.linear(wide, weights, None if bias is None else bias.double())
    # Each input adds a rounding of at most 2^-24 of the sum so far, which is at most the sum of magnitudes.
    magnitude = wide.abs() @ dense.abs().T + (0.0 if bias is None else bias.double().abs())
    bound = (rows.shape[1] + 8) * 2.0**-24 * magnitude
    if rows.dtype != torch.float32:
        bound = bound + torch.finfo(rows.dtype).eps * expected.abs() + 1e-7
    assert bool(((found.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_rounded_weights(shape: tuple[int, int], form: str) -> None:
    weights, bias = weights_of(shape, form)
    own = weights.values.dtype if weights.scales is None else torch.bfloat16
    for count, dtype in ((1, own), (5, torch.float32), (17, own)):
        rows = rows_of(count, shape[1], dtype)
        assert_is_product(rows, weights, bias, run(rows, weights, bias))
        if count == 1:
            assert_is_product(rows, weights, None, run(rows, weights, None))


def test_some_matrices_are_split_and_some_are_not() -> None:
    splits = [product.plan(on_device(weights_of(shape, "bfloat16")[0])).splits for shape in SHAPES]
    assert splits == [2, 1, 5]


def check_company(
    shape: tuple[int, int], form: str, dtype: torch.dtype = torch.float32, module: ModuleType = product
) -> None:
    weights, bias = weights_of(shape, form)
    rows = rows_of(33, shape[1], dtype)
    everything = run(rows, weights, bias, module)
    for count in (1, 16, 17):
        assert torch.equal(run(rows[:count], weights, bias, module), everything[:count]), count
        order = torch.randperm(33, generator=torch.Generator().manual_seed(count))[:count]
        company = (1e3 * rows_of(32, shape[1], torch.float32)).to(dtype)
        company = torch.cat([company, company[:1]])
        company[order] = rows[order]
        assert torch.equal(run(company, weights, bias, module)[order], everything[order]), count


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int8 in groups of 64"])
def test_a_rows_bits_do_not_depend_on_its_company(form: str) -> None:
    check_company((40, 330), form)


def test_bfloat16_rows_too() -> None:
    check_company((40, 330), "int8", torch.bfloat16)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    for form in ("float16", "int8"):
        weights, bias = weights_of((40, 330), form)
        rows = rows_of(9, 330, torch.float32)
        expected = run(rows, weights, bias)
        rows[3, 5], rows[6, 7] = float("nan"), float("inf")
        found = run(rows, weights, bias)
        well = [0, 1, 2, 4, 5, 7, 8]
        assert torch.equal(found[well], expected[well])
        assert bool(found[3].isnan().all())
        assert not bool(found[6].isfinite().any())


def test_what_does_not_fit_is_refused() -> None:
    weights = on_device(weights_of((33, 34), "bfloat16")[0])
    buffers = product.allocate(weights, torch.bfloat16)
    with pytest.raises(ValueError, match="at most 64"):
        product.linear(buffers, 65, weights)
    with pytest.raises(ValueError, match="another matrix"):
        product.linear(buffers, 1, on_device(weights_of((70, 330), "bfloat16")[0]))
    with pytest.raises(ValueError, match="do not go with"):
        product.allocate(weights, torch.float16)
    with pytest.raises(ValueError, match="multiples of 16"):
        on_device(quantize_int8(torch.randn(8, 100), 17))
    with pytest.raises(ValueError, match="must be bfloat16"):
        product.LinearWeights(torch.randn(8, 8))
    with pytest.raises(ValueError, match="int8 weights have scales"):
        product.LinearWeights(torch.zeros(8, 8, dtype=torch.int8))


@pytest.mark.parametrize(
    ("right", "wrong", "form"),
    [
        ("(start // group_size) *", "((start + block_in) // group_size % 2) *", "int8 in groups of 64"),
        ("for split in range(0, splits):", "for split in range(0, splits - 1):", "bfloat16"),
        ("right.to(tl.float32), interpreted)", "right.to(tl.float32) + 0.001, interpreted)", "float16"),
    ],
)
def test_planted_bugs_are_caught_by_the_bound(tmp_path: Path, right: str, wrong: str, form: str) -> None:
    module = planted(tmp_path, product, right, wrong)
    weights, bias = weights_of((70, 330), form)
    rows = rows_of(3, 330, torch.float32)
    with pytest.raises(AssertionError):
        assert_is_product(rows, weights, bias, run(rows, weights, bias, module))


def test_a_split_that_depends_on_the_rows_is_caught(tmp_path: Path) -> None:
    module = planted(
        tmp_path,
        product,
        "_split_kernel[(bucket // ROW_TILE, out_blocks, way.splits)](",
        "way = Plan(32 if num_rows > 16 else 128, way.splits, way.split_size)\n"
        "    _split_kernel[(bucket // ROW_TILE, out_blocks, way.splits)](",
    )
    with pytest.raises(AssertionError):
        check_company((40, 330), "bfloat16", module=module)

"""Products against the definition in float64, and each row's bits alone against its bits in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.kernels.cpu import (
    Kernels,
    PackedWeights,
    Weights,
    load_kernels,
    plain,
    quantize_int8,
    round_to_bfloat16,
)

SHAPES = [(100, 64), (33, 34), (896, 1536), (1536, 960), (40, 2240)]
FORMATS = {
    "bfloat16": round_to_bfloat16,
    "int8": quantize_int8,
    "int8 in large groups": lambda weight: quantize_int8(weight, 640),
    "int8 in groups": lambda weight: quantize_int8(weight, 32),
    "int8 in odd groups": lambda weight: quantize_int8(weight, 17),
}


def weights_of(shape: tuple[int, int], form: str) -> tuple[Weights, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    weight = 0.02 * torch.randn(shape, generator=generator)
    return FORMATS[form](weight), torch.randn(shape[0], generator=generator)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_rounded_weights(kernels: Kernels, shape: tuple[int, int], form: str) -> None:
    weights, bias = weights_of(shape, form)
    packed = kernels.pack(weights)
    for count in (1, 2, 5, 7, 16, 17, 40):
        x = torch.randn(count, shape[1])
        expected = plain.linear(x.double(), weights, bias.double())
        torch.testing.assert_close(kernels.linear(x, packed, bias).double(), expected, atol=5e-5, rtol=1e-5)
        without = kernels.linear(x, packed, None).double()
        torch.testing.assert_close(without, expected - bias.double(), atol=5e-5, rtol=1e-5)


def rounding(packed: PackedWeights) -> PackedWeights:
    return replace(packed, rounds_rows=True)


def on_tiles(kernels: Kernels, weights: Weights) -> bool:
    in_features, group = weights.values.shape[1], weights.group_size
    if weights.values.dtype is torch.bfloat16:
        return kernels.instruction_set == "amx" and in_features % 32 == 0
    return kernels.instruction_set == "amx" and in_features % 64 == 0 and (group >= in_features or group % 64 == 0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounded_rows_lose_what_they_may(kernels: Kernels, shape: tuple[int, int], form: str) -> None:
    weights, _ = weights_of(shape, form)
    packed, dense = kernels.pack(weights), weights.dense().double()
    for count in (1, 8, 9, 16, 17, 40, 130):
        x = torch.randn(count, shape[1])
        whole, found = kernels.linear(x, packed, None), kernels.linear(x, rounding(packed), None).double()
        assert torch.equal(found, whole.double()) is not on_tiles(kernels, weights)
        if not on_tiles(kernels, weights):
            continue
        if form == "bfloat16":
            expected = x.bfloat16().double() @ dense.T
            torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)
        else:  # half a step of 16 bits for each input, whatever inputs share the step
            most = 0.5 * x.abs().amax(dim=1, keepdim=True).double() / (127 * 256) * dense.abs().sum(dim=1)
            assert bool(((found - x.double() @ dense.T).abs() <= 1.01 * most + 5e-5).all())


@pytest.mark.parametrize("rounds", [False, True], ids=["whole rows", "rounded rows"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(100, 64), (96, 1536)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_its_company(
    kernels: Kernels, shape: tuple[int, int], form: str, threads: int, rounds: bool
) -> None:
    torch.set_num_threads(threads)
    weights, bias = weights_of(shape, form)
    packed = replace(kernels.pack(weights), rounds_rows=rounds)
    rows = torch.randn(40, shape[1])
    alone = torch.cat([kernels.linear(row[None], packed, bias) for row in rows])
    for count in range(1, 41):
        assert torch.equal(kernels.linear(rows[:count].contiguous(), packed, bias), alone[:count]), count
        order = torch.randperm(40)[:count]
        company = 1e3 * torch.randn(40, shape[1])
        company[order] = rows[order]
        assert torch.equal(kernels.linear(company, packed, bias)[order], alone[order]), count


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
@pytest.mark.parametrize(("count", "shape"), [(300, (70, 1536)), (131, (300, 4512))], ids=str)
def test_many_rows_meet_the_inputs_in_parts(kernels: Kernels, count: int, shape: tuple[int, int], form: str) -> None:
    weights, bias = weights_of(shape, form)
    packed = kernels.pack(weights)
    x = torch.randn(count, shape[1])
    found = kernels.linear(x, packed, bias)
    expected = plain.linear(x.double(), weights, bias.double())
    torch.testing.assert_close(found.double(), expected, atol=5e-5, rtol=1e-5)
    for row in (0, 15, 16, 33, count // 2, count - 1):
        assert torch.equal(kernels.linear(x[row : row + 1].contiguous(), packed, bias)[0], found[row]), row
    rounded = kernels.linear(x, rounding(packed), bias)
    for row in (0, 15, 16, 33, count // 2, count - 1):
        assert torch.equal(kernels.linear(x[row : row + 1].contiguous(), rounding(packed), bias)[0], rounded[row]), row


@pytest.mark.parametrize("rounds", [False, True], ids=["whole rows", "rounded rows"])
def test_what_is_not_a_number_stays_in_its_row(kernels: Kernels, rounds: bool) -> None:
    for form in FORMATS:
        weights, bias = weights_of((100, 64), form)
        packed = replace(kernels.pack(weights), rounds_rows=rounds)
        rows = torch.randn(9, 64)
        expected = kernels.linear(rows, packed, bias)
        rows[3, 5], rows[6, 7] = float("nan"), float("inf")
        found = kernels.linear(rows, packed, bias)
        well = [0, 1, 2, 4, 5, 7, 8]
        assert torch.equal(found[well], expected[well])
        assert bool(found[3].isnan().all())
        assert not bool(found[6].isfinite().any())


def spread(exponents: int, shape: tuple[int, int]) -> torch.Tensor:
    """Numbers of so many powers of two, every mantissa, both signs."""
    scale = torch.randint(0, exponents, shape)
    return torch.ldexp((1 + torch.rand(shape)) * torch.randn(shape).sign(), -scale)


# AMX keeps 32 inputs of 32 outputs in less than two bytes each where their exponents allow it.
KINDS_OF_NUMBERS = {
    "as trained": lambda shape: 0.02 * torch.randn(shape),
    "one power of two": lambda shape: spread(1, shape),
    "just narrow enough": lambda shape: spread(15, shape),
    "one too many": lambda shape: spread(16, shape),
    "all that float32 has": lambda shape: spread(230, shape) * 2.0**100,
    "nothing": torch.zeros,
    "half of nothing": lambda shape: spread(9, shape) * (torch.rand(shape) < 0.5),
    "subnormal": lambda shape: spread(9, shape) * 2.0**-124,
    "narrow and wide": lambda shape: torch.cat([spread(3, (32, shape[1])), spread(60, (shape[0] - 32, shape[1]))]),
}


@pytest.mark.parametrize("kind", KINDS_OF_NUMBERS)
@pytest.mark.parametrize("shape", [(70, 96), (32, 32), (1, 64)], ids=str)
def test_weights_are_kept_to_the_bit(kernels: Kernels, kind: str, shape: tuple[int, int]) -> None:
    weight = KINDS_OF_NUMBERS[kind]((max(shape[0], 33), shape[1]))[: shape[0]]
    weights = round_to_bfloat16(weight)
    packed = kernels.pack(weights)
    expected = weights.values.float()
    if kernels.instruction_set == "amx":  # its products take subnormal numbers for zero
        expected = torch.where(expected.abs() < 2.0**-126, 0.0, expected)
    for count in (shape[1], 20, 1):  # rows that each pick one input
        found = kernels.linear(torch.eye(shape[1])[:count].contiguous(), packed, None)
        assert torch.equal(found, expected.T[:count]), count


def test_weights_that_are_no_numbers_show(kernels: Kernels) -> None:
    weight = spread(3, (40, 64))
    weight[5, 7], weight[39, 63] = float("inf"), float("nan")
    found = kernels.linear(torch.ones(3, 64), kernels.pack(round_to_bfloat16(weight)), None)
    assert not bool(found[:, 5].isfinite().any())
    assert bool(found[:, 39].isnan().all())
    well = [output for output in range(40) if output not in (5, 39)]
    assert bool(found[:, well].isfinite().all())


def test_amx_keeps_normally_spread_weights_in_four_fifths_of_their_bytes() -> None:
    kernels = load_kernels("amx")
    if kernels is None:
        pytest.skip("this machine has no AMX")
    weights = round_to_bfloat16(0.02 * torch.randn(512, 1024))
    packed = kernels.pack(weights).data
    assert packed.numel() * packed.itemsize < 0.8 * weights.values.numel() * 2
    incompressible = round_to_bfloat16(spread(60, (512, 1024)))
    packed = kernels.pack(incompressible).data
    assert packed.numel() * packed.itemsize < 1.01 * incompressible.values.numel() * 2


def test_no_rows_give_no_rows(kernels: Kernels) -> None:
    weights, bias = weights_of((100, 64), "bfloat16")
    assert kernels.linear(torch.empty(0, 64), kernels.pack(weights), bias).shape == (0, 100)


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    packed = kernels.pack(weights_of((100, 64), "bfloat16")[0])
    with pytest.raises(RuntimeError, match="does not fit"):
        kernels.linear(torch.randn(2, 66), packed, None)
    with pytest.raises(RuntimeError, match="contiguous float32"):
        kernels.linear(torch.randn(64, 2).T, packed, None)
    odd = round_to_bfloat16(torch.randn(4, 33))
    assert not kernels.can_pack(odd)
    with pytest.raises(RuntimeError, match="odd"):
        kernels.pack(odd)


@pytest.mark.parametrize("group", [None, 16, 30, 500])
def test_int8_weights_are_within_half_a_step(group: int | None) -> None:
    weight = torch.randn(20, 100)
    weight[3], weight[4, :16] = 0.0, 0.0
    weights = quantize_int8(weight, group)
    size = min(group or 100, 100)
    assert weights.scales is not None
    assert weights.scales.shape == (-(-100 // size), 20)
    steps = weights.scales.T.repeat_interleave(size, dim=1)[:, :100]
    assert bool(((weights.dense() - weight).abs() <= 0.5001 * steps).all())
    assert bool((weights.dense()[3] == 0).all())

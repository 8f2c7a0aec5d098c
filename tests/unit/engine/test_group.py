"""Two and three ranks: exact collectives, and a sharded model that keeps the promises of one that is whole."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

RunGroup = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def pair(run_group: RunGroup, models: dict[str, str]) -> list[dict[str, Any]]:
    return run_group(2, 2, model=models["qwen2"])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def check_collectives(found: list[dict[str, Any]], scenarios: ModuleType) -> None:
    world_size = len(found)
    for rank in found:
        collectives = rank["collectives"]
        for dtype, parts in zip(scenarios.GATHERED, collectives["gathered"], strict=True):
            assert len(parts) == world_size
            for source, part in enumerate(parts):
                assert same_bits(part, scenarios.tensor_of(source, dtype)), (dtype, source)
        for rows, total in zip((1, 3, 700), collectives["sums"], strict=True):
            expected = torch.zeros(rows, 1000)
            for source in range(world_size):
                generator = torch.Generator().manual_seed(1000 * rows + source)
                part = torch.randn(rows, 1000, generator=generator)
                part[0, source] = float("nan")
                expected += part
            torch.testing.assert_close(total, expected, equal_nan=True)
            assert int(total.isnan().sum()) == world_size
            assert same_bits(total, found[0]["collectives"]["sums"][(1, 3, 700).index(rows)])
        assert collectives["broadcast"] == [[], [1, -2, 2**62], list(range(5000))]
        assert rank["row_sums_same"] == [True, True]


def test_collectives_of_two_ranks_through_shared_memory(pair: list[dict[str, Any]], scenarios: ModuleType) -> None:
    assert all(rank["collectives"]["shared_memory"] for rank in pair)
    check_collectives(pair, scenarios)


def test_a_sharded_model_gives_the_logits_of_the_whole_one(
    pair: list[dict[str, Any]], models: dict[str, str], scenarios: ModuleType
) -> None:
    whole = scenarios.model_run(scenarios.make_engine(models["qwen2"]))
    for rank, found in enumerate(pair):
        sharded = found["model"]
        for left, right in zip(sharded["logits"], whole["logits"], strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
        assert sharded["slice"] == (150 * rank, 150)
        assert sharded["local_shape"] == (1, 150)
        assert sharded["kv_shape"] == (5, 1, 16)
        assert sharded["row_invariant"]
    for left, right in zip(pair[0]["model"]["logits"], pair[1]["model"]["logits"], strict=True):
        assert torch.equal(left, right)


@pytest.fixture(scope="module")
def narrow_pair(run_group: RunGroup, models: dict[str, str]) -> list[dict[str, Any]]:
    return run_group(2, 2, model=models["qwen2"], engine={"dtype": "bfloat16"})


def test_ranks_with_narrow_weights_give_the_logits_of_a_whole_model(
    narrow_pair: list[dict[str, Any]], models: dict[str, str], scenarios: ModuleType
) -> None:
    whole = scenarios.model_run(scenarios.make_engine(models["qwen2"], dtype="bfloat16"))
    for found in narrow_pair:
        assert found["model"]["row_invariant"]
        for left, right in zip(found["model"]["logits"], whole["logits"], strict=True):
            torch.testing.assert_close(left, right, atol=1e-3, rtol=1e-3)
    for left, right in zip(*(found["model"]["logits"] for found in narrow_pair), strict=True):
        assert torch.equal(left, right)


def test_rollback_is_exact_on_each_rank(pair: list[dict[str, Any]], narrow_pair: list[dict[str, Any]]) -> None:
    for found in [*pair, *narrow_pair]:
        assert found["model"]["rollback"] == [True] * 4
        assert found["model"]["rollback_with_fault"] == [False] * 4


def test_two_ranks_that_count_as_two_hosts_use_gloo(run_group: RunGroup, scenarios: ModuleType) -> None:
    found = run_group(2, 1)
    assert not any(rank["collectives"]["shared_memory"] for rank in found)
    check_collectives(found, scenarios)


@pytest.mark.slow
@pytest.mark.parametrize("local_size", [3, 1])
def test_three_ranks_add_in_one_order(local_size: int, run_group: RunGroup, scenarios: ModuleType) -> None:
    found = run_group(3, local_size)
    assert all(rank["collectives"]["shared_memory"] == (local_size == 3) for rank in found)
    check_collectives(found, scenarios)


def test_bits_are_compared() -> None:
    (payload,) = struct.unpack("<f", struct.pack("<I", 0x7FC00001))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([payload]), torch.tensor([payload]))

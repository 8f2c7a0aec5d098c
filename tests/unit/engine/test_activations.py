"""Activations give each element the same bits, however many stand beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from outrider.workers.engine.activations import SeamlessSiLU, SeamlessTanhGELU, replace_activations
from outrider.workers.engine.linear import PackedLinear
from outrider.workers.engine.products import WeightFormat
from outrider.workers.engine.selfcheck import activations_are_row_invariant, row_counts

WIDTHS = (17, 24, 48, 96, 256)  # below, between and at multiples of vector lengths


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", [SeamlessSiLU(), SeamlessTanhGELU()])
def test_a_row_is_the_same_alone_and_among_others(activation: nn.Module, width: int) -> None:
    rows = torch.randn(70, width, generator=torch.Generator().manual_seed(width)) * 3
    alone = torch.cat([activation(row[None]) for row in rows])
    for count in range(1, 71):
        assert torch.equal(activation(rows[:count].contiguous()), alone[:count])


def test_the_functions_are_those_of_torch() -> None:
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])])
    torch.testing.assert_close(SeamlessSiLU()(x), functional.silu(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(SeamlessTanhGELU()(x), functional.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)
    assert bool(SeamlessSiLU()(torch.tensor([float("nan")])).isnan().all())


class _Uneven(nn.Module):
    """Rounds the last element of a tensor unlike the others, as scalar code behind a vector loop may."""

    __module__ = "torch.nn.modules.activation"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out.view(-1)[-1] *= 1 + 1e-6
        return out


def test_the_self_check_sees_an_activation_with_a_seam() -> None:
    linear = PackedLinear(torch.randn(48, 32), None, WeightFormat(torch.float32, torch.float32))
    counts = row_counts(64)
    assert activations_are_row_invariant(nn.Sequential(linear, SeamlessSiLU()), counts, torch.float32)
    assert not activations_are_row_invariant(nn.Sequential(linear, _Uneven()), counts, torch.float32)


def test_torch_and_transformers_activations_are_replaced() -> None:
    from transformers.activations import ACT2FN

    model = nn.Sequential(nn.SiLU(), ACT2FN["silu"], ACT2FN["gelu_pytorch_tanh"], nn.ReLU())
    replace_activations(model)
    assert [type(module).__name__ for module in model] == ["SeamlessSiLU", "SeamlessSiLU", "SeamlessTanhGELU", "ReLU"]

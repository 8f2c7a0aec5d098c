"""Activations whose elements do not depend on how many there are.

torch computes ``silu``, ``sigmoid`` and ``gelu`` of a tensor's last few elements, and of those at the seams between
threads, by scalar code that rounds differently from the vector code that does the rest. So a row's bits would depend on
the number of rows beside it wherever rows times width is no multiple of the vector length. ``exp``, ``tanh`` and
arithmetic have no such seam.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class SeamlessSiLU(nn.Module):
    """``x * sigmoid(x)``, as ``x / (1 + exp(-x))`` in float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


class SeamlessTanhGELU(nn.Module):
    """The tanh form of GELU (Hendrycks, Gimpel, arXiv 1606.08415, section 2), in float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


_SEAMLESS: dict[str, type[nn.Module]] = {
    "SiLU": SeamlessSiLU,
    "SiLUActivation": SeamlessSiLU,
    "GELUTanh": SeamlessTanhGELU,
    "NewGELUActivation": SeamlessTanhGELU,
}


def is_activation(module: nn.Module) -> bool:
    """Whether a module is one of torch's, transformers' or our activations."""
    return type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations", __name__)


def replace_activations(model: nn.Module) -> None:
    """Put seamless activations in place of those that have one here; the self-check judges the others."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if is_activation(child) and type(child).__name__ in _SEAMLESS:
                setattr(parent, name, _SEAMLESS[type(child).__name__]())

"""How linear layers keep their weights and multiply: chosen once for a model, by its settings and the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.cluster.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.kernels.cpu import Kernels, PackedWeights, Weights, load_kernels, quantize_int8, round_to_bfloat16

logger = logging.getLogger(__name__)

# oneDNN computes a single row in another order than the same row among several.
MIN_ROWS = 2


class Product(Protocol):
    """``rows @ weight.T + bias`` for one weight matrix."""

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows [n, in_features], at least one -> [n, out_features]"""


@dataclass(frozen=True)
class KernelProduct:
    """On our kernels: bfloat16 or int8 weights, float32 rows."""

    kernels: Kernels
    weights: PackedWeights

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return self.kernels.linear(rows.contiguous(), self.weights, bias)

    def rounding_rows(self) -> KernelProduct:
        """The same with rows that may be rounded."""
        return replace(self, weights=replace(self.weights, rounds_rows=True))


@dataclass(frozen=True)
class OneDnnProduct:
    """On oneDNN's packed weights, whose order of summation does not depend on the number of rows from two on."""

    weight: Tensor  # opaque

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = rows.shape[0]
        if num_rows < MIN_ROWS:
            rows = rows.expand(MIN_ROWS, -1).contiguous()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, bias, "none", [], "")
        return out[:num_rows]


@dataclass(frozen=True)
class PlainProduct:
    """On torch's linear, whose bits depend on the number of rows."""

    weight: Tensor  # [out_features, in_features]

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(rows, self.weight, bias)


@dataclass(frozen=True)
class WeightFormat:
    """What weights become.

    Attributes:
        activations: type of what flows between the layers.
        rounding: type that weights are rounded to.
        quantized: whether they are int8 instead.
        group_size: inputs that share a scale then; None: all inputs of an output.
        kernels: what multiplies bfloat16 and int8 weights here. Without, the same numbers are kept in float32.
        packed: whether oneDNN packs the rest.
    """

    activations: torch.dtype
    rounding: torch.dtype
    quantized: bool = False
    group_size: int | None = None
    kernels: Kernels | None = None
    packed: bool = False

    @property
    def narrow(self) -> bool:
        """Whether weights are narrower than the activations."""
        return self.quantized or self.rounding != self.activations

    def product(self, weight: Tensor) -> Product:
        """weight [out_features, in_features] in any type; it can be let go then."""
        if not self.narrow:
            return self._dense_product(weight.to(self.activations))
        weights = self._rounded(weight)
        if self.kernels is not None and self.kernels.can_pack(weights):
            return KernelProduct(self.kernels, self.kernels.pack(weights))
        return self._dense_product(weights.dense().to(self.activations))

    def _rounded(self, weight: Tensor) -> Weights:
        return quantize_int8(weight, self.group_size) if self.quantized else round_to_bfloat16(weight)

    def _dense_product(self, weight: Tensor) -> Product:
        if self.packed:
            return OneDnnProduct(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))
        return PlainProduct(weight.contiguous())


def choose_format(config: EngineConfig, device: torch.device) -> WeightFormat:
    """The format that settings ask for on a device. Raises ``ConfigError`` where the device has no such thing."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    quantized = config.quantization is not None
    if device.type != "cpu":
        if quantized:
            raise ConfigError(f"quantization is {config.quantization}, which is there for device cpu only")
        return WeightFormat(dtype, dtype)
    narrow = quantized or dtype == torch.bfloat16
    activations = torch.float32 if narrow else dtype
    kernels = load_kernels() if narrow else None
    packed = packs(activations)
    if kernels is None and not packed:
        logger.warning("oneDNN packs no %s weights on this machine; results will depend on the batch", activations)
    return WeightFormat(activations, dtype, quantized, config.quantization_group_size, kernels, packed)


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed product works here for this type: it is tried, since builds and processors differ."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        product = OneDnnProduct(torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype)))
        out = product(torch.zeros(2, 16, dtype=dtype), None)
    except (RuntimeError, AttributeError):
        return False
    return bool((out == 0).all())

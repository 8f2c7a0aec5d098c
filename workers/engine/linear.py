"""Linear layers whose rows do not depend on one another, and their tensor-parallel forms.

``torch.nn.functional.linear`` picks another algorithm, and another order of summation, for each number of rows. Neither
our kernels nor oneDNN's packed product do (docs/exactness.md); ``products`` has both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.kernels.cpu import Affine
from outrider.workers.engine.parallel import Parallel
from outrider.workers.engine.products import KernelProduct, WeightFormat


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` on weights in the given format. The weight that it was made from is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> None:
        # weight: [out_features, in_features]; bias: [out_features]
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.product = weight_format.product(weight)
        self.bias = None if bias is None else bias.to(weight_format.activations)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] -> [..., out_features]"""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.product(rows, bias).reshape(*x.shape[:-1], self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def round_rows(self) -> None:
        """From now on rows may be rounded, where our kernels multiply."""
        if isinstance(self.product, KernelProduct):
            self.product = self.product.rounding_rows()

    @property
    def affine(self) -> Affine | None:
        """What our kernels multiply by, and add; None where they do not."""
        return Affine(self.product.weights, self.bias) if isinstance(self.product, KernelProduct) else None


class RowParallelLinear(PackedLinear):
    """A rank's part of a product whose inputs are split: the parts are summed, then the bias is added once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parallel: Parallel, weight_format: WeightFormat) -> None:
        super().__init__(weight, bias, weight_format)
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.complete(self.multiply(x, None).contiguous())

    def complete(self, part: Tensor) -> Tensor:
        """This rank's part [..., out_features] of the sum -> the sum with the bias, in the same place."""
        self.parallel.all_reduce(part)
        return part if self.bias is None else part.add_(self.bias)

    @property
    def affine(self) -> Affine | None:
        """Without the bias, which is added to the sum."""
        return Affine(self.product.weights) if isinstance(self.product, KernelProduct) else None


class WideningEmbedding(nn.Module):
    """Rows of an embedding kept in the checkpoint's own type; looked-up rows are converted, which loses nothing."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight  # [rows, hidden]
        self.dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_ids, self.weight).to(self.dtype)


class VocabParallelHead(nn.Module):
    """A rank's contiguous slice of the output embedding, cut to the tokens that exist.

    Attributes:
        vocab_size: tokens in all.
        vocab_offset: first token of this rank.
        slice_size: tokens of each rank but perhaps the last ones, which have fewer.
        local_vocab_size: tokens of this rank.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        vocab_size: int,
        parallel: Parallel,
        weight_format: WeightFormat,
    ) -> None:
        # weight: [at least vocab_size, hidden] in any type
        super().__init__()
        self.vocab_size = vocab_size
        self.slice_size = -(-vocab_size // parallel.world_size)
        self.vocab_offset = min(parallel.rank * self.slice_size, vocab_size)
        end = min(self.vocab_offset + self.slice_size, vocab_size)
        self.local_vocab_size = end - self.vocab_offset
        own = weight[self.vocab_offset : end].clone()  # a plain product would else keep the whole weight alive
        own_bias = None if bias is None else bias[self.vocab_offset : end]
        self.linear = PackedLinear(own, own_bias, weight_format)
        self.parallel = parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> [n, local_vocab_size] float32"""
        out: Tensor = self.linear(hidden)
        return out.float()

    def gather(self, local_logits: Tensor) -> Tensor:
        """local_logits [n, local_vocab_size] float32 -> [n, vocab_size] float32 on every rank"""
        if self.parallel.world_size == 1:
            return local_logits
        padded = nn.functional.pad(local_logits, (0, self.slice_size - self.local_vocab_size))
        return torch.cat(self.parallel.gather(padded), dim=1)[:, : self.vocab_size]


# torch's own, and those that DeepSpeed makes of layers whose outputs are split among the ranks.
WHOLE_OR_COLUMN_PARALLEL = ("Linear", "LinearLayer", "fused_LinearLayer", "GateUpPack_LinearLayer")
ROW_PARALLEL = "LinearAllreduce"


def replace_linear(
    layer: nn.Module, parallel: Parallel, weight_format: WeightFormat, device: torch.device
) -> PackedLinear:
    """Ours in place of a layer of torch's or of DeepSpeed's tensor parallelism."""
    kind = type(layer).__name__
    own = dict(layer.named_parameters(recurse=False))
    weight, bias = own["weight"].data.to(device), own["bias"].data.to(device) if "bias" in own else None
    if kind in WHOLE_OR_COLUMN_PARALLEL:
        return PackedLinear(weight, bias, weight_format)
    if kind == ROW_PARALLEL:
        return RowParallelLinear(weight, bias, parallel, weight_format)
    raise ConfigError(f"model: tensor parallelism made a layer of kind {kind}, which the engine does not know")

"""Linear layers whose rows do not depend on one another, and their tensor-parallel forms.

``torch.nn.functional.linear`` picks another algorithm, and another order of summation, for each number of rows.
oneDNN's packed product does not from two rows on (docs/exactness.md), so a single row is padded to two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.workers.engine.parallel import Parallel

MIN_ROWS = 2


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed product works here for this type: it is tried, since builds and processors differ."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype))
        out = torch.ops.mkldnn._linear_pointwise(torch.zeros(2, 16, dtype=dtype), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return bool((out == 0).all())


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` on oneDNN's packed weights, or plainly where ``packed`` is False.

    The unpacked weight is not kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        # weight: [out_features, in_features]; bias: [out_features]
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = packed
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if packed else weight.contiguous()
        self.bias = bias

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] -> [..., out_features]"""
        if not self.packed:
            return nn.functional.linear(x, self.weight, bias)
        rows = x.reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        if num_rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if num_rows < MIN_ROWS:
            rows = rows.expand(MIN_ROWS, -1).contiguous()
        out = torch.ops.mkldnn._linear_pointwise(rows, self.weight, bias, "none", [], "")
        return out[:num_rows].reshape(*x.shape[:-1], self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)


class RowParallelLinear(PackedLinear):
    """A rank's part of a product whose inputs are split: the parts are summed, then the bias is added once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parallel: Parallel, *, packed: bool) -> None:
        super().__init__(weight, bias, packed=packed)
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x, None).contiguous()
        self.parallel.all_reduce(out)
        return out if self.bias is None else out.add_(self.bias)


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
        dtype: torch.dtype,
        *,
        packed: bool,
    ) -> None:
        # weight: [at least vocab_size, hidden] in any type
        super().__init__()
        self.vocab_size = vocab_size
        self.slice_size = -(-vocab_size // parallel.world_size)
        self.vocab_offset = min(parallel.rank * self.slice_size, vocab_size)
        end = min(self.vocab_offset + self.slice_size, vocab_size)
        self.local_vocab_size = end - self.vocab_offset
        own = weight[self.vocab_offset : end].to(dtype)
        own_bias = None if bias is None else bias[self.vocab_offset : end].to(dtype)
        self.linear = PackedLinear(own if packed else own.clone(), own_bias, packed=packed)
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

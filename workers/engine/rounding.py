"""Lets a loaded model round the rows that its products take.

Last of all: until then replacements are compared with what they replace, to the precision of float32.
"""

from __future__ import annotations

from torch import nn

from outrider.workers.engine.fused import FusedBlock
from outrider.workers.engine.fused_decoder import FusedDecoder
from outrider.workers.engine.linear import PackedLinear


def round_rows(model: nn.Module) -> None:
    """In place, wherever our kernels multiply: rows may be rounded to bfloat16 (``PackedWeights.rounds_rows``)."""
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, PackedLinear):
            module.round_rows()
    for module in modules:
        if isinstance(module, FusedBlock):
            module.products_changed()
    for module in modules:
        if isinstance(module, FusedDecoder):
            module.blocks_changed()

"""min_p: drop what is much less likely than the most likely token (Nguyen et al., arXiv 2407.01082)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import NumberControl, RowText, Stage

if TYPE_CHECKING:
    from torch import Tensor


class MinP(NumberControl):
    """Keeps the tokens of at least ``min_p`` times the largest probability."""

    name = "min_p"
    stage = Stage.WARP
    order = 30
    help = "Drop tokens less likely than this share of the most likely one."
    neutral = 0.0

    def limit(self, value: float) -> str | None:
        return None if 0.0 <= value <= 1.0 else "from 0 to 1"

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        probs = row.softmax(dim=-1)
        return row.masked_fill(probs < value * probs.max(), -math.inf)

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        # p >= min_p * p_max, without the sums: a score within log(min_p) of the largest one.
        limits = scores.new_tensor([math.log(value) for value in values])[:, None]  # [n, 1]
        scores.masked_fill_(scores < scores.amax(dim=-1, keepdim=True) + limits, -math.inf)

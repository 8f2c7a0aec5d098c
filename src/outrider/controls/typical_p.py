"""typical_p: keep the tokens whose surprise is nearest to the expected one (Meister et al., arXiv 2202.00666)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import NumberControl, RowText, Stage

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_RANKED = 1024  # tokens that are ranked before all are


class TypicalP(NumberControl):
    """Ranks tokens by |-log p - entropy| and keeps the shortest beginning whose mass reaches ``typical_p``, together
    with what ranks equal to its last."""

    name = "typical_p"
    stage = Stage.WARP
    order = 40
    help = "Keep the most typical tokens up to this mass."
    neutral = 1.0

    def limit(self, value: float) -> str | None:
        return None if 0.0 < value <= 1.0 else "above 0 and at most 1"

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        log_probs = row.log_softmax(dim=-1)
        probs = log_probs.exp()
        possible = probs > 0
        entropy = -(probs[possible] * log_probs[possible]).sum()
        distance = (-log_probs - entropy).abs()
        mass, last = 0.0, math.inf
        ranked, order = distance.sort()
        for prob, far in zip(probs[order].tolist(), ranked.tolist(), strict=True):
            mass += prob
            if mass >= value:
                last = far
                break
        return row.masked_fill(distance > last, -math.inf)

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        log_probs = scores.log_softmax(dim=-1)
        probs = log_probs.exp()
        # probs * log_probs is NaN for excluded tokens only, and those do not count.
        entropy = -(probs * log_probs).nansum(dim=-1, keepdim=True)  # [n, 1]
        distance = log_probs.neg_().sub_(entropy).abs_()
        wanted = scores.new_tensor(values)[:, None]
        last, reached = _last_distance(distance, probs, wanted, min(_FIRST_RANKED, scores.shape[-1]))
        missing = (~reached).nonzero()[:, 0]
        if len(missing):
            last[missing] = _last_distance(distance[missing], probs[missing], wanted[missing], scores.shape[-1])[0]
        scores.masked_fill_(distance > last, -math.inf)


def _last_distance(distance: Tensor, probs: Tensor, wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The distance at which the mass of the ``count`` most typical tokens reaches what is wanted.

    Args:
        distance, probs: [n, s] float64, wanted: [n, 1] float64.

    Returns:
        [n, 1] float64, the last one where it is not reached, and whether it is: [n] bool.
    """
    ranked, columns = distance.topk(count, dim=-1, largest=False)
    mass = probs.gather(1, columns).cumsum(dim=-1)
    index = (mass < wanted).sum(dim=-1, keepdim=True)
    return ranked.gather(1, index.clamp(max=count - 1)), index[:, 0] < count

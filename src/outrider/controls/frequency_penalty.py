"""frequency_penalty: subtracted from the logits of tokens for each time that the output holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import NumberControl, RowText, Stage
from outrider.controls.indices import output_counts

if TYPE_CHECKING:
    from torch import Tensor

MAX_PENALTY = 2.0


class FrequencyPenalty(NumberControl):
    """How often a token occurred in the output counts."""

    name = "frequency_penalty"
    stage = Stage.LOGITS
    order = 40
    help = "Subtracted from the logits of tokens for each time that they occur in the output."
    neutral = 0.0
    needs_text = True

    def limit(self, value: float) -> str | None:
        return None if -MAX_PENALTY <= value <= MAX_PENALTY else f"from -{MAX_PENALTY:g} to {MAX_PENALTY:g}"

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        row = row.clone()
        output = list(text.output())
        for token in set(output):
            row[token] -= value * output.count(token)
        return row

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        found = output_counts(scores, texts)
        if found is not None:
            ids, counts = found
            # The product in float64, rounded once.
            penalties = counts.double() * scores.new_tensor(values, dtype=scores.double().dtype)[:, None]
            scores.scatter_(1, ids, scores.gather(1, ids) - penalties.to(scores.dtype))

"""frequency_penalty: subtracted from the logits of tokens for each time that the output holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import RowText
from outrider.controls.indices import output_counts
from outrider.controls.output_penalty import OutputPenalty

if TYPE_CHECKING:
    from torch import Tensor


class FrequencyPenalty(OutputPenalty):
    """How often a token occurred in the output counts."""

    name = "frequency_penalty"
    order = 40
    help = "Subtracted from the logits of tokens for each time that they occur in the output."

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

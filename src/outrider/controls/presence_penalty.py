"""presence_penalty: subtracted once from the logits of tokens that the output holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import RowText
from outrider.controls.indices import output_counts
from outrider.controls.output_penalty import OutputPenalty

if TYPE_CHECKING:
    from torch import Tensor


class PresencePenalty(OutputPenalty):
    """Whether a token occurred in the output counts, and not how often."""

    name = "presence_penalty"
    order = 30
    help = "Subtracted from the logits of tokens that occur in the output."

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        row = row.clone()
        for token in set(text.output()):
            row[token] -= value
        return row

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        found = output_counts(scores, texts)
        if found is not None:
            ids, counts = found
            penalties = scores.new_tensor(values)[:, None] * (counts > 0)
            scores.scatter_(1, ids, scores.gather(1, ids) - penalties)

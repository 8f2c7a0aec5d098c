"""repetition_penalty: make tokens that the text holds already less likely (Keskar et al., arXiv 1909.05858, 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import NumberControl, RowText, Stage
from outrider.controls.indices import token_matrix

if TYPE_CHECKING:
    from torch import Tensor

MIN_PENALTY, MAX_PENALTY = 0.01, 10.0  # beyond, logits leave what float32 holds well


class RepetitionPenalty(NumberControl):
    """Divides positive logits of tokens in prompt or output by the penalty and multiplies negative ones, once each."""

    name = "repetition_penalty"
    stage = Stage.LOGITS
    order = 20
    help = "Above 1, tokens of the prompt and the output become less likely; below 1, more likely."
    neutral = 1.0
    needs_text = True

    def limit(self, value: float) -> str | None:
        return None if MIN_PENALTY <= value <= MAX_PENALTY else f"from {MIN_PENALTY:g} to {MAX_PENALTY:g}"

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        row = row.clone()
        for token in set(text.seen()):
            row[token] = row[token] * value if row[token] < 0 else row[token] / value
        return row

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        found = token_matrix(scores, texts, output_only=False)
        if found is None:
            return
        ids, counts = found
        # A column that does not count repeats one that does; equal columns write equal values. A row without tokens
        # divides by 1.
        ids = ids.where(counts, ids[:, :1])
        penalties = scores.new_tensor(
            [value if text.length else 1.0 for value, text in zip(values, texts, strict=True)]
        )
        old = scores.gather(1, ids)
        scores.scatter_(1, ids, (old * penalties[:, None]).where(old < 0, old / penalties[:, None]))

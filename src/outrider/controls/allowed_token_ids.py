"""allowed_token_ids: the only tokens that may be sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import Control, Facts, RowText, Stage, checked_token_ids
from outrider.controls.indices import row_entries

if TYPE_CHECKING:
    from torch import Tensor


class AllowedTokenIds(Control):
    """Given as a list of token ids; resolved ascending and without repetitions. Nothing else is allowed, the end of the
    text included."""

    name = "allowed_token_ids"
    stage = Stage.LOGITS
    order = 60
    help = "The only tokens that may be sampled, as a JSON list of token ids."
    metavar = "JSON"

    def resolve(self, value: Any, facts: Facts) -> tuple[int, ...] | None:
        tokens = tuple(sorted(set(checked_token_ids(self, value, facts.vocab_size))))
        if not tokens:
            self.refuse(value, "a list of at least one token id")
        return tokens if len(tokens) < facts.vocab_size else None

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        kept = row.new_full(row.shape, -math.inf)
        for token in value:
            kept[token] = row[token]
        return kept

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        entries = row_entries(scores, values)
        kept = scores[entries]
        scores.fill_(-math.inf)
        scores[entries] = kept

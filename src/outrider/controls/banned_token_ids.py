"""banned_token_ids: tokens that are never sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import Control, Facts, RowText, Stage, checked_token_ids
from outrider.controls.indices import row_entries

if TYPE_CHECKING:
    from torch import Tensor


class BannedTokenIds(Control):
    """Given as a list of token ids; resolved ascending and without repetitions."""

    name = "banned_token_ids"
    stage = Stage.LOGITS
    order = 70
    help = "Tokens that are never sampled, as a JSON list of token ids."
    metavar = "JSON"

    def resolve(self, value: Any, facts: Facts) -> tuple[int, ...] | None:
        tokens = tuple(sorted(set(checked_token_ids(self, value, facts.vocab_size))))
        if len(tokens) == facts.vocab_size:
            self.refuse(f"all {len(tokens)} tokens", "a list that leaves a token")
        return tokens or None

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        row = row.clone()
        for token in value:
            row[token] = -math.inf
        return row

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        scores[row_entries(scores, values)] = -math.inf

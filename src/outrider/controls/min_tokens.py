"""min_tokens: the output's first tokens do not end it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import Control, Facts, RowText, Stage, checked_token_ids
from outrider.controls.indices import row_entries
from outrider.core.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 1 << 31


class MinTokens(Control):
    """Given as a number of tokens n; resolved as (n, tokens that end the text).

    Those tokens are excluded where the row's token is one of the first n of the output, unless nothing else is left:
    a text that is complete by its grammar ends.
    """

    name = "min_tokens"
    stage = Stage.LOGITS
    order = 80
    help = "Tokens before which the output does not end."
    metavar = "INTEGER"
    needs_text = True

    def resolve(self, value: Any, facts: Facts) -> tuple[int, tuple[int, ...]] | None:
        number = self._checked_number(value)
        ends = tuple(sorted(facts.end_token_ids))
        return (number, ends) if number and ends else None

    def fault(self, value: Any, vocab_size: int) -> str | None:
        try:
            if not isinstance(value, tuple) or len(value) != 2:
                self.refuse(value, "a number and a list of token ids")
            self._checked_number(value[0])
            if not checked_token_ids(self, value[1], vocab_size, "[1]"):
                self.refuse(value[1], "a list of at least one token id", "[1]")
        except InvalidRequest as error:
            return str(error)
        return None

    def _checked_number(self, value: Any) -> int:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not whole or value != int(value) or not 0 <= value < MAX_TOKENS:
            self.refuse(value, f"a whole number from 0 to {MAX_TOKENS - 1}")
        return int(value)

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        number, ends = value
        if text.output_len >= number:
            return row
        without = row.clone()
        for token in ends:
            without[token] = -math.inf
        return without if without.max() > -math.inf else row

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        pairs = zip(values, texts, strict=True)
        excluded = [ends if text.output_len < number else () for (number, ends), text in pairs]
        if any(excluded):
            rows, tokens = row_entries(scores, excluded)
            old = scores[rows, tokens]
            scores[rows, tokens] = -math.inf
            is_empty = scores.amax(dim=-1)[rows] == -math.inf
            scores[rows, tokens] = old.masked_fill(~is_empty, -math.inf)

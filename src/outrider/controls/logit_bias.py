"""logit_bias: numbers that are added to the logits of chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import Control, Facts, RowText, Stage, checked_token_id
from outrider.controls.indices import row_entries
from outrider.core.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

MAX_BIAS = 100.0
MAX_ENTRIES = 1024


class LogitBias(Control):
    """Given as {token id: bias}; resolved as ((token id, bias), ...), ascending."""

    name = "logit_bias"
    stage = Stage.LOGITS
    order = 10
    help = "Added to the logits of tokens, as a JSON object of token id to bias."
    metavar = "JSON"

    def resolve(self, value: Any, facts: Facts) -> tuple[tuple[int, float], ...] | None:
        if not isinstance(value, Mapping):
            self.refuse(value, "an object of token ids to biases")
        if len(value) > MAX_ENTRIES:
            self.refuse(f"{len(value)} entries", f"at most {MAX_ENTRIES} entries")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            part = f"[{key}]"
            # Keys of JSON objects are strings.
            number = int(key) if isinstance(key, str) and key.isdecimal() else key
            token = checked_token_id(self, number, facts.vocab_size, part)
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MAX_BIAS:
                self.refuse(bias, f"a number from -{MAX_BIAS:g} to {MAX_BIAS:g}", part)
            if token in biases:
                self.refuse(key, "a token that is named once only", part)
            biases[token] = float(bias)
        changed = tuple((token, bias) for token, bias in sorted(biases.items()) if bias != 0.0)
        return changed or None

    def fault(self, value: Any, vocab_size: int) -> str | None:
        try:
            self.resolve(dict(value), Facts(vocab_size, frozenset(), lambda text: ()))
        except (InvalidRequest, TypeError, ValueError) as error:
            return f"sampling.{self.name}: {error}"
        return None

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        row = row.clone()
        for token, bias in value:
            row[token] += bias
        return row

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        rows, tokens = row_entries(scores, [[token for token, _ in value] for value in values])
        scores[rows, tokens] += scores.new_tensor([bias for value in values for _, bias in value])

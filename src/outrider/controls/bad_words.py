"""bad_words: words that the output never completes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.controls.base import Control, Facts, RowText, Stage, checked_token_ids
from outrider.controls.indices import row_entries
from outrider.core.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

MAX_WORDS = 1024


class BadWords(Control):
    """Given as a list of words; resolved as the token sequences that spell them, bare and with a space before.

    The last token of a sequence is excluded where the tokens before the row end with the others, those of the prompt
    included. A word that the tokenizer spells otherwise in its surroundings is not recognised.
    """

    name = "bad_words"
    stage = Stage.LOGITS
    order = 50
    help = "A word that the output must not hold; may be given several times."
    metavar = "TEXT"
    repeated = True
    needs_text = True

    def resolve(self, value: Any, facts: Facts) -> tuple[tuple[int, ...], ...] | None:
        if not isinstance(value, list | tuple):
            self.refuse(value, "a list of words")
        if len(value) > MAX_WORDS:
            self.refuse(f"{len(value)} words", f"at most {MAX_WORDS} words")
        sequences: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(value):
            part = f"[{index}]"
            if not isinstance(word, str) or not word.strip():
                self.refuse(word, "a word that is not empty", part)
            bare = tuple(facts.encode(word.lstrip()))
            spaced = tuple(facts.encode(" " + word.lstrip()))
            for sequence in (bare, spaced):
                if not sequence or any(not 0 <= token < facts.vocab_size for token in sequence):
                    self.refuse(word, "a word that the tokenizer spells with tokens of the vocabulary", part)
            sequences[bare] = None
            if spaced[-len(bare) :] != bare:  # else the bare one excludes it already
                sequences[spaced] = None
        return tuple(sorted(sequences)) or None

    def fault(self, value: Any, vocab_size: int) -> str | None:
        try:
            if not isinstance(value, tuple) or not 0 < len(value) <= 2 * MAX_WORDS:
                self.refuse(value, f"1 to {2 * MAX_WORDS} lists of token ids")
            for index, sequence in enumerate(value):
                if not checked_token_ids(self, sequence, vocab_size, f"[{index}]"):
                    self.refuse(sequence, "a list with a token id", f"[{index}]")
        except InvalidRequest as error:
            return str(error)
        return None

    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        row = row.clone()
        for token in _excluded(value, text):
            row[token] = -math.inf
        return row

    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        excluded = [_excluded(value, text) for value, text in zip(values, texts, strict=True)]
        scores[row_entries(scores, excluded)] = -math.inf


def _excluded(sequences: Sequence[tuple[int, ...]], text: RowText) -> list[int]:
    """Last tokens of the sequences that the row's token would complete."""
    last = text.tokens[text.length - 1] if text.length else None
    excluded = []
    for sequence in sequences:
        before = len(sequence) - 1
        # Comparing the last token first spares nearly every slice.
        if before == 0 or (
            before <= text.length
            and sequence[-2] == last
            and tuple(text.tokens[text.length - before : text.length]) == sequence[:-1]
        ):
            excluded.append(sequence[-1])
    return excluded

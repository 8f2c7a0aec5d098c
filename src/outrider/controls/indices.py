"""Lists of tokens, one for each of n rows, as indices: for the controls that touch few tokens. No control by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.controls.base import RowText

if TYPE_CHECKING:
    from torch import Tensor


def row_entries(scores: Tensor, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows and columns, [m] int64 each, of the entries that n lists of tokens name."""
    whole = scores.new_empty(0).long()
    rows = [row for row, some in enumerate(tokens) for _ in some]
    return whole.new_tensor(rows), whole.new_tensor([token for some in tokens for token in some])


def token_matrix(scores: Tensor, texts: Sequence[RowText], *, output_only: bool) -> tuple[Tensor, Tensor] | None:
    """The tokens before each row, or the output tokens among them.

    Args:
        scores: names the device.
        texts: n; neighbours that share their tokens are converted once.

    Returns:
        ids [n, L] int64 and counts [n, L] bool: column c of a row counts if it lies before the row's end; the others
        hold token 0. None where no row has a token before it.
    """
    starts = [min(text.prompt_len, text.length) if output_only else 0 for text in texts]
    longest = max((text.length - start for text, start in zip(texts, starts, strict=True)), default=0)
    if longest == 0:
        return None
    whole = scores.new_empty(0).long()
    ids = whole.new_zeros(len(texts), longest)
    first = 0
    for last in range(1, len(texts) + 1):  # rows first .. last - 1 share their tokens and where they start
        text, start = texts[first], starts[first]
        if last < len(texts) and texts[last].tokens is text.tokens and starts[last] == start:
            continue
        end = max(row.length for row in texts[first:last])
        ids[first:last, : end - start] = whole.new_tensor(text.tokens[start:end])
        first = last
    lengths = whole.new_tensor([text.length - start for text, start in zip(texts, starts, strict=True)])
    columns = whole.new_ones(longest).cumsum(0) - 1
    return ids, columns[None] < lengths[:, None]


def output_counts(scores: Tensor, texts: Sequence[RowText]) -> tuple[Tensor, Tensor] | None:
    """How often each output token before a row occurs there.

    Args:
        scores: [n, V] float32.

    Returns:
        ids [n, L] int64, with repetitions, and for each entry the count of its token [n, L] float32, 0 where the row
        has no such token. None where no row has output before it.
    """
    found = token_matrix(scores, texts, output_only=True)
    if found is None:
        return None
    ids, counts = found
    totals = scores.new_zeros(scores.shape).scatter_add_(1, ids, counts.to(scores.dtype))
    return ids, totals.gather(1, ids)

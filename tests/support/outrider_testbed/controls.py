"""What every sampling control must satisfy: for tests of single controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.controls import Control, RowText, Stage


def assert_apply_is_reference(
    control: Control, values: Sequence[Any], *, vocab_size: int = 24, num_rows: int = 12, seed: int = 0
) -> None:
    """Compare ``apply`` on many rows, with values in turn, with ``reference`` on each: over the whole vocabulary and,
    for WARP controls, over a part of it. Rows have texts of several lengths, some of them shared.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = torch.float32 if control.stage is Stage.LOGITS else torch.float64
    scores = (torch.randn(num_rows, vocab_size, generator=generator) * 2).to(kind)
    tokens = torch.randint(0, vocab_size, (num_rows // 2 + 1, 9), generator=generator).tolist()
    texts = [RowText(tokens[row // 2], row % 10, 3) for row in range(num_rows)]
    chosen = [values[row % len(values)] for row in range(num_rows)]
    expected = torch.stack(
        [control.reference(row, value, text) for row, value, text in zip(scores, chosen, texts, strict=True)]
    )
    applied = scores.clone()
    control.apply(applied, None, chosen, texts)
    torch.testing.assert_close(applied, expected)
    for row in range(num_rows):  # and a row alone is the row in company, bit for bit
        alone = scores[row : row + 1].clone()
        control.apply(alone, None, chosen[row : row + 1], texts[row : row + 1])
        assert torch.equal(alone[0], applied[row])
    if control.stage is Stage.WARP:
        part = torch.arange(0, vocab_size, 2).expand(num_rows, -1)
        narrow = scores.gather(1, part)
        wide = torch.full_like(scores, -torch.inf).scatter_(1, part, narrow)
        expected = torch.stack(
            [control.reference(row, value, text) for row, value, text in zip(wide, chosen, texts, strict=True)]
        )
        control.apply(narrow, part, chosen, texts)
        torch.testing.assert_close(narrow, expected.gather(1, part))

"""Rows that no filter cuts, on a CPU: drawn from, and proposals for them judged, without a copy of a row.

Rows that are undecided (``kernels.cpu.draws``) are in no answer: the general way takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.controls import Stage
from outrider.kernels.batched.rows import Row, row_keys, take
from outrider.kernels.batched.wide import wide_draws
from outrider.kernels.reference.noise import Purpose


def is_whole(row: Row, vocab_size: int) -> bool:
    """Whether a row is drawn from as it is, but for the temperature. Masks and bans are in its logits."""
    sampling = row.sampling
    return not 0 < sampling.top_k < vocab_size and sampling.top_p >= 1.0 and not row.has(Stage.WARP)


def draw_whole(
    logits: Tensor,
    rows: Sequence[Row],
    members: Sequence[int],
    purpose: Purpose,
) -> dict[int, int]:
    """The tokens that rows ``members`` draw, by index; of some or all of them.

    Args:
        logits: [n, V] float32, processed.
        rows: n.
        members: rows that are whole.
    """
    draws = wide_draws(logits)
    if draws is None or not members:
        return {}
    chosen = [rows[i] for i in members]
    tokens = draws.draw(take(logits, members), temperatures_of(chosen), row_keys(chosen, purpose)).tolist()
    return {i: token for i, token in zip(members, tokens, strict=True) if token >= 0}


def decide_whole(
    logits: Tensor,
    rows: Sequence[Row],
    members: Sequence[int],
    tokens: Sequence[int],
    draft_ids: Tensor,
    draft_probs: Tensor,
) -> dict[int, tuple[bool, int]]:
    """``reference.rejection.decide`` for rows ``members``, by index: of some or all of them, (accepted, own).

    Args:
        tokens: of the proposals; draft_ids [m, w] int64, draft_probs [m, w] float64: their q.
    """
    draws = wide_draws(logits)
    if draws is None or not members:
        return {}
    chosen = [rows[i] for i in members]
    accepted, own = draws.decide(
        take(logits, members),
        temperatures_of(chosen),
        torch.tensor(tokens),
        draft_ids,
        draft_probs,
        row_keys(chosen, Purpose.ACCEPT),
        row_keys(chosen, Purpose.RESIDUAL),
    )
    decided = zip(members, accepted.tolist(), own.tolist(), strict=True)
    return {i: (flag == 1, token) for i, flag, token in decided if flag >= 0}


def temperatures_of(rows: Sequence[Row]) -> Tensor:
    """[n] float64"""
    return torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float64)

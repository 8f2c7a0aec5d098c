"""What the batched kernels take and give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.logprobs import TokenLogprobs
from outrider.core.sampling import Sampling


@dataclass(frozen=True)
class Chain:
    """One sequence's verification: k proposed tokens, k + 1 rows.

    Attributes:
        logits: [k + 1, V] float32: row i is the target's logits in the place of ``draft_tokens[i]``, the last one those
            behind the proposal.
        draft_tokens: k proposed tokens.
        draft_rows: under rejection (token_ids [m] int64, probs [m] float32) for each of them; empty for one-hot.
        first_position: position of row 0's token, in prompt + output.
        text: the tokens before that position; looked at where ``controls.needs_text`` says so, may be empty elsewhere.
        allowed: [k + 1, V] bool: what the grammar allows in each row; None without a grammar. Rows behind a proposed
            token that it forbids are never reached.
    """

    logits: Tensor
    sampling: Sampling
    first_position: int
    draft_tokens: Sequence[int] = ()
    draft_rows: Sequence[tuple[Tensor, Tensor]] = ()
    text: Sequence[int] = ()
    allowed: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """What one chain commits: its first ``num_accepted`` proposed tokens, then ``next_token``.

    Attributes:
        error: why it commits nothing, or None: a row that is needed holds no distribution, or q rows do not fit.
        is_invalid_logits: whether the error is the target's own, and not the proposal's.
        is_nothing_allowed: whether it is that the settings leave no token in a row that held a distribution.
        logprobs: for each committed token, where the sampling asks for them.
    """

    num_accepted: int = 0
    next_token: int = -1
    error: str | None = None
    is_invalid_logits: bool = False
    is_nothing_allowed: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Ask:
    """What a draft is asked for one row: the token at ``position``.

    Attributes:
        prefix_hash: of the tokens before it.
        text: those tokens, or more; looked at where ``controls.needs_text`` says so.
        allowed: [V] bool; None without a grammar.
    """

    sampling: Sampling
    position: int
    prefix_hash: int = 0
    text: Sequence[int] = ()
    allowed: Tensor | None = None

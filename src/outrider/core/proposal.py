"""What a draft proposes.

A proposal continues a *base*, a committed prefix that it names by length and hash. Tokens may form a tree; a chain has
no parents. ``rows[i]`` is the distribution that token ``i`` was drawn from; without rows each token was chosen with
certainty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from outrider.core.prefix import HashedTokens

ROW_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class SparseRow:
    """A truncated, renormalised distribution: the one that the proposed token was drawn from."""

    token_ids: np.ndarray  # [m] int64
    probs: np.ndarray  # [m] float32, positive, sums to 1

    @property
    def num_bytes(self) -> int:
        """Bytes that the row takes on the wire before encoding: 4 for a token id, 4 for a probability."""
        return 8 * len(self.token_ids)


@dataclass(frozen=True)
class Proposal:
    """Candidate tokens that continue ``base_len`` committed tokens."""

    proposal_id: int
    base_len: int
    base_hash: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    rows: tuple[SparseRow, ...] = ()
    drafter: str = "model"
    draft_ms: float = 0.0

    @property
    def is_chain(self) -> bool:
        return not self.parents or self.parents == tuple(range(-1, len(self.tokens) - 1))


def proposal_fault(proposal: Proposal, vocab_size: int) -> str | None:
    """What is wrong with a proposal that came over the network, or None.

    A faulty proposal counts as absent: it costs speed, never text.
    """
    if any(token >= vocab_size or token < 0 for token in proposal.tokens):
        return f"a token outside the vocabulary of {vocab_size}"
    if proposal.parents and len(proposal.parents) != len(proposal.tokens):
        return "parents and tokens differ in number"
    if any(not -1 <= parent < index for index, parent in enumerate(proposal.parents)):
        return "a parent that does not come before its child"
    if not proposal.rows:
        return None
    if len(proposal.rows) != len(proposal.tokens):
        return "rows and tokens differ in number"
    for token, row in zip(proposal.tokens, proposal.rows, strict=True):
        fault = row_fault(row, vocab_size)
        if fault is not None:
            return fault
        if token not in row.token_ids:
            return "a token that its own row gives no probability"
    return None


def row_fault(row: SparseRow, vocab_size: int) -> str | None:
    """Why a row is no distribution over the vocabulary, or None."""
    if len(row.token_ids) == 0 or len(row.token_ids) != len(row.probs):
        return "a row without entries, or with more ids than probabilities"
    total = float(row.probs.sum(dtype=np.float64))
    if not math.isfinite(total) or abs(total - 1.0) > ROW_SUM_TOLERANCE or float(row.probs.min()) <= 0.0:
        return "a row that is not a distribution"
    low, high = int(row.token_ids.min()), int(row.token_ids.max())
    if low < 0 or high >= vocab_size or len(np.unique(row.token_ids)) != len(row.token_ids):
        return "a row with a token twice or outside the vocabulary"
    return None


def sound_part(proposal: Proposal, vocab_size: int) -> Proposal:
    """A chain up to its first row that is no distribution; the whole proposal if that is the first row of all.

    A row depends on the tokens before it. To drop those because of it would be to judge them by what they are, which
    bends rejection (docs/exactness.md).
    """
    if not proposal.is_chain or len(proposal.rows) != len(proposal.tokens):
        return proposal
    broken = (index for index, row in enumerate(proposal.rows) if row_fault(row, vocab_size) is not None)
    return shorten(proposal, next(broken, 0) or len(proposal.tokens))


def usable_suffix(proposal: Proposal, committed: HashedTokens) -> Proposal | None:
    """The part of a chain that still continues the committed text, or None.

    If ``j`` tokens were committed since the base and equal the first ``j`` proposed ones, the others may be verified:
    the committed tokens were drawn without a look at them (docs/exactness.md, late proposals). Nothing is repaired.
    """
    skip = len(committed) - proposal.base_len
    if skip < 0 or skip >= len(proposal.tokens) or committed.hashes[proposal.base_len] != proposal.base_hash:
        return None
    if skip == 0:
        return proposal
    if not proposal.is_chain or tuple(committed.tokens[proposal.base_len :]) != proposal.tokens[:skip]:
        return None
    return replace(
        proposal,
        base_len=len(committed),
        base_hash=committed.hashes[-1],
        tokens=proposal.tokens[skip:],
        parents=(),
        rows=proposal.rows[skip:],
    )


def shorten(proposal: Proposal, length: int) -> Proposal:
    """The first ``length`` tokens of a chain. ``length`` must not depend on what the tokens are."""
    if length >= len(proposal.tokens):
        return proposal
    return replace(proposal, tokens=proposal.tokens[:length], parents=(), rows=proposal.rows[:length])

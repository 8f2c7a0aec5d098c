"""Outcomes of verification."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.reference.errors import InvalidLogitsError, invalid_logits


@dataclass(frozen=True)
class Verdict:
    """The outcome for one chain: ``num_accepted`` proposals, then ``next_token``, are committed."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True)
class Verdicts:
    """The outcome for b chains.

    Attributes:
        num_accepted: [b] int64.
        next_tokens: [b] int64; -1 where a row that was needed holds no distribution. Such a chain commits nothing.
    """

    num_accepted: Tensor
    next_tokens: Tensor

    def one(self, index: int, first_position: int) -> Verdict:
        """The outcome for one chain. Raises ``InvalidLogitsError`` where ``next_tokens`` is -1."""
        return checked_verdict(int(self.num_accepted[index]), int(self.next_tokens[index]), first_position)


def checked_verdict(num_accepted: int, next_token: int, first_position: int) -> Verdict:
    """A verdict, or ``InvalidLogitsError`` where the next token is -1."""
    if next_token < 0:
        raise InvalidLogitsError(invalid_logits(first_position + num_accepted))
    return Verdict(num_accepted, next_token)

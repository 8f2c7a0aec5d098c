"""Log-probabilities as plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LogprobsMode(enum.IntEnum):
    """Which distribution they are of; the numbers are those of the protocol.

    PROCESSED is the one that is sampled from; at temperature 0, that of the logits after every control, at temperature
    1.
    """

    RAW = 1
    PROCESSED = 2


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of one token, and of the most likely ones in its place.

    Attributes:
        rank: 1 for the most likely token.
        top_ids: most likely first, equal ones by token id; as many as were asked for, or as have a positive
            probability.
        top_logprobs: one for each of ``top_ids``.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

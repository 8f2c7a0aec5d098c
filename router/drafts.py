"""What a scheduler and its draft workers tell each other, as plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from outrider.core.sampling import Sampling


class EvictionReason(enum.IntEnum):
    """Why a draft dropped a session; the numbers are those of the protocol."""

    UNSPECIFIED = 0
    CONTEXT_FULL = 1
    NO_MEMORY = 2
    INVALID_LOGITS = 3
    SHUTDOWN = 4


@dataclass(frozen=True)
class DraftFacts:
    """What a draft worker says of itself when it joins."""

    draft_id: str
    drafter: str
    max_model_len: int
    max_num_tokens: int


@dataclass(frozen=True)
class DraftOpen:
    """Start a session. ``session_id`` is never used twice by one scheduler."""

    draft_id: str
    session_id: int
    request_id: str
    generation: int
    tokens: tuple[int, ...]
    prefix_hash: int
    sampling: Sampling
    num_tokens: int
    traceparent: str = ""  # of the round that the proposal is for; empty where the request is not traced


@dataclass(frozen=True)
class DraftCommit:
    """The committed text is now its first ``base_len`` tokens followed by ``tokens``; ``hash`` names the whole.

    ``num_tokens`` is what the draft is asked to propose next; 0 means: keep up, propose nothing.
    """

    draft_id: str
    session_id: int
    generation: int
    base_len: int
    tokens: tuple[int, ...]
    proposal_id: int
    num_accepted: int
    hash: int
    num_tokens: int
    traceparent: str = ""


@dataclass(frozen=True)
class DraftClose:
    draft_id: str
    session_id: int
    generation: int


DraftEvent = DraftOpen | DraftCommit | DraftClose

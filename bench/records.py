"""What the client saw of each request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.client import Speculation


@dataclass(frozen=True)
class Arrival:
    """One message with tokens, and when it came, in seconds of the client's clock."""

    at: float
    tokens: int


@dataclass(frozen=True)
class Record:
    """One request.

    Attributes:
        arm: "plain" or "speculative"; of a peer its name.
        block: which turn of its arm.
        due: when it was to be sent; ``begun``: when it was. They differ where the client fell behind.
        ended: when it ended, in the same clock.
        error: why it failed; None where it did not.
        refused: whether it was the server that found it impossible, such as a prompt beyond its context.
    """

    workload: str
    item: str
    index: int
    arm: str
    block: int
    due: float
    begun: float
    ended: float
    arrivals: tuple[Arrival, ...] = ()
    prompt_tokens: int = 0
    finish_reason: str = ""
    speculation: Speculation | None = None
    error: str | None = None
    refused: bool = False

    @property
    def tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def seconds(self) -> float:
        """From sending it to its end."""
        return self.ended - self.begun

    @property
    def ttft_s(self) -> float | None:
        """From when it was due to its first token: a client that falls behind hides nothing."""
        return self.arrivals[0].at - self.due if self.arrivals else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first message; None with fewer than two messages."""
        if len(self.arrivals) < 2:
            return None
        span = self.arrivals[-1].at - self.arrivals[0].at
        return (self.tokens - self.arrivals[0].tokens) / span if span > 0 else None

    @property
    def message_gaps_s(self) -> list[float]:
        """Seconds from one message to the next."""
        return [after.at - before.at for before, after in itertools.pairwise(self.arrivals)]

    @property
    def token_gaps_s(self) -> list[float]:
        """The same, divided by the tokens that the later one brought; once for each of those tokens."""
        gaps = []
        for before, after in itertools.pairwise(self.arrivals):
            gaps += [(after.at - before.at) / after.tokens] * after.tokens
        return gaps

    def to_dict(self, origin: float) -> dict[str, Any]:
        """As JSON, times from ``origin`` on."""
        return {
            "workload": self.workload,
            "item": self.item,
            "index": self.index,
            "arm": self.arm,
            "block": self.block,
            "due_s": round(self.due - origin, 6),
            "begun_s": round(self.begun - origin, 6),
            "ended_s": round(self.ended - origin, 6),
            "arrivals": [[round(arrival.at - origin, 6), arrival.tokens] for arrival in self.arrivals],
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "speculation": self.speculation.to_dict() if self.speculation is not None else None,
            "error": self.error,
        }


def sound(records: Sequence[Record]) -> list[Record]:
    """Those that did not fail."""
    return [record for record in records if record.error is None]

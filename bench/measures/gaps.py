"""Which gaps of running streams fall into the time in which a prompt entered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.numbers import Distribution
from outrider.bench.records import Arrival


@dataclass(frozen=True)
class Window:
    """From ``begun`` to ``ended``, in seconds of the client's clock."""

    begun: float
    ended: float

    def meets(self, begun: float, ended: float) -> bool:
        """Whether a gap overlaps it: one that only touches it felt nothing."""
        return ended > self.begun and begun < self.ended


@dataclass
class Stream:
    """One request: when it was sent, and its messages so far."""

    begun: float
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass
class Gaps:
    """Seconds between messages, and the same for each token (see ``outrider.bench.records``)."""

    message: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)

    def add(self, before: Arrival, after: Arrival) -> None:
        gap = after.at - before.at
        self.message.append(gap)
        self.token += [gap / after.tokens] * after.tokens

    def extend(self, other: Gaps) -> None:
        self.message += other.message
        self.token += other.token

    def to_dict(self) -> dict[str, Any]:
        """In milliseconds."""
        return {"message_gap_ms": in_ms(self.message), "token_gap_ms": in_ms(self.token)}


def split(streams: Sequence[Stream], windows: Sequence[Window]) -> tuple[Gaps, list[Gaps]]:
    """The gaps that meet no window, and those that meet each of them.

    A gap in which another one of the streams entered itself belongs to neither: it felt a prompt that was not meant.
    """
    quiet, within = Gaps(), [Gaps() for _ in windows]
    starts = [Window(each.begun, each.arrivals[0].at if each.arrivals else math.inf) for each in streams]
    for stream in streams:
        for before, after in itertools.pairwise(stream.arrivals):
            if any(start.meets(before.at, after.at) for start in starts):
                continue
            met = [gaps for window, gaps in zip(windows, within, strict=True) if window.meets(before.at, after.at)]
            for gaps in met or [quiet]:
                gaps.add(before, after)
    return quiet, within


def p99_ratio(before: Sequence[float], during: Sequence[float]) -> float | None:
    """None where one side saw nothing, or nothing that took time."""
    one, other = Distribution.of(before), Distribution.of(during)
    return round(other.p99 / one.p99, 4) if one is not None and other is not None and one.p99 > 0 else None


def in_ms(seconds: Sequence[float]) -> dict[str, Any] | None:
    """None of no values."""
    distribution = Distribution.of([1000 * value for value in seconds])
    if distribution is None:
        return None
    return {
        "count": distribution.count,
        "mean": round(distribution.mean, 3),
        "p50": round(distribution.p50, 3),
        "p99": round(distribution.p99, 3),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Smallest, median and largest; None of no values."""
    distribution = Distribution.of(values)
    if distribution is None:
        return None
    return {
        "count": distribution.count,
        "p50": round(distribution.p50, 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }

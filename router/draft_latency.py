"""How long a draft takes for a proposal, by how many requests it drafts for."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.router.goodput import size_class
from outrider.router.policy import Pace


@dataclass(eq=False)
class Latencies:
    """Learned apart for each class of numbers of sessions: what eight have to wait for says little of one.

    Attributes:
        last: what holds where a proposal came last.
    """

    last: Pace = field(default_factory=Pace)
    _paces: dict[int, Pace] = field(default_factory=dict)

    def took(self, num_sessions: int, seconds: float, *, beside: bool) -> None:
        """A proposal came."""
        size = size_class(num_sessions)
        self.last = self._paces[size] = self._paces.get(size, Pace()).took(seconds, beside=beside)

    def expected(self, num_sessions: int) -> Pace:
        """What holds among so many: what fewer met, where it is not known, or else what more met at worst."""
        size = size_class(num_sessions)
        fewer, more = [n for n in self._paces if n <= size], [n for n in self._paces if n > size]
        if fewer:
            return self._paces[max(fewer)]
        return Pace(beside_s=self._paces[min(more)].slowest_s) if more else Pace()

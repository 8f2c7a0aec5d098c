"""How long a draft worker's steps and proposals take, and how its sessions end."""

from __future__ import annotations

from outrider.core.histogram import STEP_S, Histogram
from outrider.workers.draft.messages import EvictionReason


class DraftTimes:
    """Counts of one worker since it began; its compute thread writes them, whoever tells its metrics reads.

    Attributes:
        step: seconds of a step.
        proposal: seconds from a commit to the proposal that answers it.
        num_rows: rows that ran.
        evictions: sessions that were dropped, by why.
    """

    def __init__(self) -> None:
        self.step = Histogram(STEP_S)
        self.proposal = Histogram(STEP_S)
        self.num_rows = 0
        self.evictions = dict.fromkeys((reason.name.lower() for reason in EvictionReason), 0)

    def stepped(self, seconds: float, num_rows: int) -> None:
        self.step.observe(seconds)
        self.num_rows += num_rows

    def evicted(self, reason: EvictionReason) -> None:
        self.evictions[reason.name.lower()] += 1

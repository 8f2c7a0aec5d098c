"""How long a rank's steps take, by their parts."""

from __future__ import annotations

from outrider.core.histogram import STEP_S, Histogram

PHASES = ("plan", "forward", "verify")


class StepTimes:
    """Counts of one rank since it began; its step thread writes them, whoever tells its metrics reads.

    Attributes:
        phases: seconds of a step's parts. "plan": taking the plan in and, on the leader, handing it on. "forward": the
            pass. "verify": the exchange with other ranks and, on the leader, the decision.
        num_rows: rows that ran.
    """

    def __init__(self) -> None:
        self.phases = {phase: Histogram(STEP_S) for phase in PHASES}
        self.num_rows = 0

    def took(self, plan_s: float, forward_s: float, verify_s: float, num_rows: int) -> None:
        """A step is over."""
        for phase, seconds in zip(PHASES, (plan_s, forward_s, verify_s), strict=True):
            self.phases[phase].observe(seconds)
        self.num_rows += num_rows

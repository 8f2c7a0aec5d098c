"""What steps cost beside the model's own pass, measured where they run.

A step's overhead lasts from the moment when its plan is handed to the stream, or when the step before it was committed
if that is later, until its result was committed, less the leader's forward pass. Two parts of it are the leader's own:
handing the plan to the other ranks, and deciding. The rest is the way there and back and the scheduler's work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.core.histogram import STEP_S, Histogram
from outrider.core.plan import StepPlan, StepTiming
from outrider.core.quantiles import nearest_rank

KEPT = 512  # latest steps
KINDS = ("prefill", "mixed", "verify", "decode")


@dataclass(frozen=True)
class Quantiles:
    """Milliseconds; zeros before the first step."""

    p50: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True)
class Overhead:
    """What the latest ``num_steps`` steps cost."""

    num_steps: int
    overhead_ms: Quantiles
    plan_ms: Quantiles
    verify_ms: Quantiles


@dataclass
class OverheadMeter:
    """Remembers the latest steps, as (overhead, plan, verify) in milliseconds, and counts all of them by their times.

    Attributes:
        step_time: whole steps in seconds, by kind (``step_kind``).
        overhead: what of them is not the model's pass, in seconds.
    """

    step_time: dict[str, Histogram] = field(default_factory=lambda: {kind: Histogram(STEP_S) for kind in KINDS})
    overhead: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    _steps: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    _committed: float = -math.inf

    def committed(self, handed: float, now: float, timing: StepTiming, kind: str = "decode") -> None:
        """A step was committed at ``now`` whose plan was handed to the stream at ``handed``; seconds on one clock."""
        begun = max(handed, self._committed)
        self._committed = now
        self.step_time[kind].observe(now - begun)
        self.overhead.observe(now - begun - timing.forward_ms / 1000.0)
        self._steps.append((1000.0 * (now - begun) - timing.forward_ms, timing.plan_ms, timing.verify_ms))

    def snapshot(self) -> Overhead:
        """What is known so far."""
        return Overhead(len(self._steps), *(quantiles(step[part] for step in self._steps) for part in range(3)))


def step_kind(plan: StepPlan) -> str:
    """What a step is for: "prefill" enters prompts alone, "mixed" enters some beside requests that decode; without
    prompts it is "verify" if it has proposals, else "decode".
    """
    prompts = sum(not sequence.logits_rows or sequence.num_text_tokens > 1 for sequence in plan.sequences)
    if prompts:
        return "prefill" if prompts == len(plan.sequences) else "mixed"
    return "verify" if any(sequence.num_proposal_tokens for sequence in plan.sequences) else "decode"


def quantiles(values: Iterable[float]) -> Quantiles:
    """The smallest values that half of all, and 99 of 100, do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles()
    return Quantiles(nearest_rank(ordered, 0.5), nearest_rank(ordered, 0.99))

"""What steps cost beside the model's pass."""

from __future__ import annotations

import pytest

from outrider.core.plan import StepTiming
from outrider.router.overhead import KEPT, OverheadMeter, Quantiles, quantiles


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantiles([]) == Quantiles(0.0, 0.0)
    assert quantiles([3.0]) == Quantiles(3.0, 3.0)
    assert quantiles(range(200, 0, -1)) == Quantiles(100, 198)


def test_the_pass_is_not_counted() -> None:
    meter = OverheadMeter()
    meter.committed(10.0, 10.5, StepTiming(total_ms=480.0, plan_ms=1.0, forward_ms=470.0, verify_ms=4.0))
    overhead = meter.snapshot()
    assert overhead.num_steps == 1
    assert overhead.overhead_ms.p50 == pytest.approx(30.0)
    assert (overhead.plan_ms.p99, overhead.verify_ms.p99) == (1.0, 4.0)


def test_a_plan_that_was_handed_on_early_costs_nothing_before_its_turn() -> None:
    meter = OverheadMeter()
    meter.committed(0.0, 1.0, StepTiming(forward_ms=1000.0))
    meter.committed(0.5, 2.0, StepTiming(forward_ms=990.0))
    assert meter.snapshot().overhead_ms.p99 == pytest.approx(10.0)


def test_old_steps_are_forgotten() -> None:
    meter = OverheadMeter()
    for step in range(2 * KEPT):
        meter.committed(step, step + (0.25 if step < KEPT else 0.5), StepTiming())
    assert meter.snapshot().num_steps == KEPT
    assert meter.snapshot().overhead_ms == Quantiles(500.0, 500.0)

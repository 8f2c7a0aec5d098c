"""What a rank tells traces of a step: one span for each sequence whose request is traced, once the step is over."""

from __future__ import annotations

import time
from collections.abc import Iterable

from outrider.core.plan import SequenceResult, StepPlan, StepTiming
from outrider.core.tracing import Tracing


def record_step(
    tracing: Tracing,
    plan: StepPlan,
    rank: int,
    duration_s: float,
    *,
    results: Iterable[SequenceResult] = (),
    timing: StepTiming | None = None,
) -> None:
    """``duration_s``: how long this rank worked on the step, which ends now. The leader knows results and timing."""
    end_ns = time.time_ns()
    start_ns = end_ns - round(1e9 * duration_s)
    sequences = {sequence.seq_id: sequence for sequence in plan.sequences}
    outcomes = {result.seq_id: result for result in results}
    step: dict[str, int | float] = {
        "outrider.rank": rank,
        "outrider.epoch": plan.epoch,
        "outrider.step": plan.step,
        "outrider.step.num_rows": plan.num_rows,
        "outrider.step.num_sequences": len(plan.sequences),
    }
    if timing is not None:
        step |= {"outrider.step.plan_ms": timing.plan_ms, "outrider.step.forward_ms": timing.forward_ms}
        step["outrider.step.verify_ms"] = timing.verify_ms
    for seq_id, traceparent in plan.traces:
        sequence, outcome = sequences.get(seq_id), outcomes.get(seq_id)
        if sequence is None:
            continue
        own: dict[str, int | float] = {
            "outrider.num_rows": len(sequence.tokens),
            "outrider.num_draft_tokens": sequence.num_proposal_tokens,
        }
        if outcome is not None:
            own["outrider.num_accepted_tokens"] = outcome.num_accepted
        tracing.record("verify", traceparent, start_ns, end_ns, step | own)

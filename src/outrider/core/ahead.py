"""Plans that are made before the result of the step before them is known, and how they become ordinary ones.

A plan with ``after_step`` says of a sequence that this step carries too how it goes on from where the step leaves it:
``kv_len`` counts from the positions that are valid then, and where the step commits tokens, the last of them comes
before ``tokens``. Sequences that the step does not carry are planned as ever. Leader and scheduler both call
``resolve`` once they know the result; it is a pure function, so they agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outrider.core.plan import SequenceError, SequencePlan, SequenceResult, StepPlan

UNDECIDED_MESSAGE = "the step before did not decide how this sequence goes on, so it did not run"


def resolve(plan: StepPlan, before: StepPlan, outcome: Iterable[SequenceResult]) -> StepPlan:
    """The plan with absolute positions, given the step before it (itself absolute) and its result.

    Sequences that this step left with an error are not in it: they do not run. A plan without ``after_step`` stays as
    it is. Raises ``ValueError`` if it was made after another step.
    """
    if plan.after_step is None:
        return plan
    if plan.after_step != before.step:
        raise ValueError(f"step {plan.step} was planned after step {plan.after_step}, but {before.step} ran before it")
    results = {result.seq_id: result for result in outcome}
    carried = {sequence.seq_id: sequence for sequence in before.sequences}
    sequences = (_resolved(s, carried.get(s.seq_id), results.get(s.seq_id)) for s in plan.sequences)
    return replace(plan, sequences=tuple(s for s in sequences if s is not None), after_step=None)


def undecided(plan: StepPlan, resolved: StepPlan) -> dict[int, SequenceResult]:
    """What is answered for the sequences of ``plan`` that did not get into ``resolved``, by their id."""
    run = {sequence.seq_id for sequence in resolved.sequences}
    return {
        sequence.seq_id: SequenceResult(
            sequence.seq_id,
            sequence.generation,
            error=SequenceError.UNDECIDED,
            error_message=UNDECIDED_MESSAGE,
        )
        for sequence in plan.sequences
        if sequence.seq_id not in run
    }


def _resolved(plan: SequencePlan, before: SequencePlan | None, result: SequenceResult | None) -> SequencePlan | None:
    if before is None or before.generation != plan.generation:
        return plan
    if result is None or result.error is not None:
        return None
    if result.committed:
        held = before.kv_len + before.num_text_tokens + result.num_accepted
        return replace(plan, kv_len=held + plan.kv_len, tokens=(result.committed[-1], *plan.tokens))
    return replace(plan, kv_len=before.kv_len + len(before.tokens) + plan.kv_len)

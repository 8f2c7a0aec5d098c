"""The one decision of a step, taken by the leader: what each sequence commits."""

from __future__ import annotations

import torch

from outrider.core.plan import SequenceError, SequencePlan, SequenceResult, StepPlan
from outrider.kernels.reference.errors import InvalidLogitsError
from outrider.kernels.reference.verify import Verdict, verify_best, verify_chain
from outrider.workers.target.step import Admission, Exchanged, Rows, needs_best_only, wanted_rows


def decide(plan: StepPlan, admission: Admission, exchanged: Exchanged) -> tuple[SequenceResult, ...]:
    """One result for each sequence of the plan, in its order. Changes nothing.

    A sequence whose row holds no distribution answers INVALID_LOGITS, and one that the ranks refused INVALID_PLAN; the
    others are not affected.
    """
    # A chunk that wants no logits has nothing to report.
    results = [SequenceResult(sequence.seq_id, sequence.generation) for sequence in plan.sequences]
    for refused in admission.refused:
        results[refused.index] = _error(refused.plan, SequenceError.INVALID_PLAN, refused.message)
    taken = {True: 0, False: 0}  # rows of either tensor that earlier sequences took, whatever became of those
    for span in wanted_rows(admission.admitted):
        sequence = span.sequence
        best_only = needs_best_only(sequence.sampling)
        start = taken[best_only]
        taken[best_only] = stop = start + span.stop - span.start
        try:
            from_exchanged = _from_pairs if best_only else _from_logits
            verdict = from_exchanged(span, exchanged, slice(start, stop))
            accepted = proposal_of(sequence.plan)[: verdict.num_accepted]
            results[sequence.index] = SequenceResult(
                sequence.plan.seq_id,
                sequence.plan.generation,
                num_accepted=verdict.num_accepted,
                committed=(*accepted, verdict.next_token),
            )
        except InvalidLogitsError as error:
            results[sequence.index] = _error(sequence.plan, SequenceError.INVALID_LOGITS, str(error))
        except ValueError as error:  # q rows that do not fit the proposal: only the leader has them
            results[sequence.index] = _error(sequence.plan, SequenceError.INVALID_PLAN, str(error))
    return tuple(results)


def proposal_of(plan: SequencePlan) -> tuple[int, ...]:
    """The tokens of a plan that are proposals."""
    return plan.tokens[len(plan.tokens) - plan.num_proposal_tokens :]


def _from_pairs(span: Rows, exchanged: Exchanged, rows: slice) -> Verdict:
    if exchanged.best_values is None or exchanged.best_tokens is None:
        raise RuntimeError("the ranks exchanged no pairs")
    return verify_best(
        exchanged.best_values[:, rows],
        exchanged.best_tokens[:, rows],
        proposal_of(span.sequence.plan),
        first_position=span.first_position,
    )


def _from_logits(span: Rows, exchanged: Exchanged, rows: slice) -> Verdict:
    if exchanged.full_logits is None:
        raise RuntimeError("the ranks gathered no rows")
    sampling, plan = span.sequence.sampling, span.sequence.plan
    draft_rows = [(torch.from_numpy(row.token_ids), torch.from_numpy(row.probs)) for row in plan.draft_rows]
    return verify_chain(
        exchanged.full_logits[rows],
        proposal_of(plan),
        draft_rows or None,
        first_position=span.first_position,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        choice=sampling.choice,
        verifier=sampling.verifier.label,
    )


def _error(plan: SequencePlan, code: SequenceError, message: str) -> SequenceResult:
    return SequenceResult(plan.seq_id, plan.generation, error=code, error_message=message)

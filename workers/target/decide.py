"""The one decision of a step, taken by the leader: what each sequence commits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InvalidRequest
from outrider.core.plan import SequenceError, SequencePlan, SequenceResult, StepPlan
from outrider.grammar import GrammarError, Matcher
from outrider.kernels.batched.data import Chain, Outcome
from outrider.kernels.batched.verify import verify
from outrider.kernels.reference.errors import InvalidLogitsError
from outrider.kernels.reference.verify import Verdict, combine_best, verify_own
from outrider.workers.target.step import Admission, Exchanged, Rows, needs_best_only, verified_rows


class _Undecided(Exception):
    """Why a sequence commits nothing."""

    def __init__(self, code: SequenceError, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class _Mask:
    """What a sequence's grammar allows in its rows. [k + 1, vocab_size] bool"""

    allowed: np.ndarray
    grammar_us: int


def decide(
    plan: StepPlan,
    admission: Admission,
    exchanged: Exchanged,
    matchers: Mapping[int, Future[Matcher]] | None = None,
    patience_s: float = 0.0,
) -> tuple[SequenceResult, ...]:
    """One result for each sequence of the plan, in its order.

    A sequence that cannot be decided answers with an error of its own, see ``SequenceError``; the others are not
    affected.

    Args:
        matchers: of the sequences with a grammar, by their id. They move along; nothing else changes.
        patience_s: how long to wait, in all, for grammars that are still being compiled.
    """
    # A chunk that wants no logits has nothing to report.
    results = [SequenceResult(sequence.seq_id, sequence.generation) for sequence in plan.sequences]
    for refused in admission.refused:
        results[refused.index] = _error(refused.plan, SequenceError.INVALID_PLAN, refused.message)
    deadline = time.monotonic() + patience_s
    own: list[int] = []  # the best token of each row that pairs decide
    if exchanged.best_values is not None and exchanged.best_tokens is not None:
        own = combine_best(exchanged.best_values, exchanged.best_tokens).tolist()
    taken = {True: 0, False: 0}  # rows of either tensor that earlier sequences took, whatever became of those
    chains: list[tuple[Rows, Chain, _Mask | None]] = []
    for span in verified_rows(admission.admitted):
        sequence = span.sequence
        best_only = needs_best_only(sequence.sampling)
        start = taken[best_only]
        taken[best_only] = stop = start + span.stop - span.start
        try:
            if best_only:
                verdict = _from_pairs(span, own[start:stop])
                outcome = Outcome(verdict.num_accepted, verdict.next_token)
                results[sequence.index] = _result(span, outcome, None)
            else:
                mask = _mask(span, matchers or {}, deadline) if sequence.sampling.grammar is not None else None
                chains.append((span, _chain(span, exchanged, slice(start, stop), mask), mask))
        except _Undecided as error:
            results[sequence.index] = _error(sequence.plan, error.code, error.message)
    outcomes = verify([chain for _, chain, _ in chains])
    for (span, _, mask), outcome in zip(chains, outcomes, strict=True):
        results[span.sequence.index] = _result(span, outcome, mask)
    for index, entries in exchanged.prompt_logprobs.items():
        if entries is not None:
            results[index] = replace(results[index], prompt_logprobs=entries)
        elif results[index].error is None:
            message = "the target's logits for a position of the prompt have a NaN or +inf, or no finite entry"
            results[index] = _error(plan.sequences[index], SequenceError.INVALID_LOGITS, message)
    return tuple(results)


def _from_pairs(span: Rows, own: Sequence[int]) -> Verdict:
    if not own:
        raise RuntimeError("the ranks exchanged no pairs")
    try:
        return verify_own(own, span.sequence.plan.proposal, first_position=span.first_position)
    except InvalidLogitsError as error:
        raise _Undecided(SequenceError.INVALID_LOGITS, str(error)) from error


def _mask(span: Rows, matchers: Mapping[int, Future[Matcher]], deadline: float) -> _Mask:
    plan, sampling = span.sequence.plan, span.sequence.sampling
    future = matchers.get(plan.seq_id)
    if future is None:
        raise RuntimeError(f"nobody compiles the grammar of sequence {plan.seq_id}")
    began = time.perf_counter_ns()
    try:
        matcher = future.result(timeout=max(0.0, deadline - time.monotonic()))
        output = span.sequence.text[sampling.prompt_len : span.first_position]
        allowed = matcher.allowed(output, plan.proposal)
    except TimeoutError:
        raise _Undecided(SequenceError.NOT_READY, "the grammar is still being compiled") from None
    except (InvalidRequest, GrammarError) as error:
        raise _Undecided(SequenceError.INVALID_PLAN, str(error)) from error
    except Exception as error:  # whatever compiling raised, it concerns this sequence alone
        raise _Undecided(SequenceError.INVALID_PLAN, f"the grammar failed: {error}") from error
    return _Mask(allowed, (time.perf_counter_ns() - began) // 1000)


def _chain(span: Rows, exchanged: Exchanged, rows: slice, mask: _Mask | None) -> Chain:
    if exchanged.full_logits is None:
        raise RuntimeError("the ranks gathered no rows")
    sequence, plan = span.sequence, span.sequence.plan
    logits = exchanged.full_logits[rows]
    return Chain(
        logits=logits,
        sampling=sequence.sampling,
        first_position=span.first_position,
        draft_tokens=plan.proposal,
        draft_rows=[(torch.from_numpy(row.token_ids), torch.from_numpy(row.probs)) for row in plan.draft_rows],
        text=sequence.text[: span.first_position],
        allowed=None if mask is None else _on_device(mask.allowed, logits),
    )


def _on_device(allowed: np.ndarray, logits: Tensor) -> Tensor:
    return torch.from_numpy(allowed).to(logits.device)


def _result(span: Rows, outcome: Outcome, mask: _Mask | None) -> SequenceResult:
    plan = span.sequence.plan
    if outcome.error is not None:
        return _error(plan, _code(outcome), outcome.error)
    # The grammar leaves no choice where one token is allowed: what is proposed there says nothing about the draft.
    forced = (mask.allowed[: len(plan.proposal)].sum(axis=1) == 1).tolist() if mask is not None else []
    return SequenceResult(
        plan.seq_id,
        plan.generation,
        num_accepted=outcome.num_accepted,
        committed=(*plan.proposal[: outcome.num_accepted], outcome.next_token),
        logprobs=outcome.logprobs,
        num_forced_tokens=sum(forced),
        num_forced_accepted=sum(forced[: outcome.num_accepted]),
        grammar_us=mask.grammar_us if mask is not None else 0,
    )


def _code(outcome: Outcome) -> SequenceError:
    if not outcome.is_invalid_logits:
        return SequenceError.INVALID_PLAN  # q rows that do not fit the proposal: only the leader has them
    return SequenceError.NOTHING_ALLOWED if outcome.is_nothing_allowed else SequenceError.INVALID_LOGITS


def _error(plan: SequencePlan, code: SequenceError, message: str) -> SequenceResult:
    return SequenceResult(plan.seq_id, plan.generation, error=code, error_message=message)

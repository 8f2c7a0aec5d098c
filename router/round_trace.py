"""The spans of one choice of a traced request at the scheduler: its rounds, each from one commit to the next.

A round's span is the parent of what other processes do for it: the draft's proposal, which it is told of by the commit
before, and the ranks' verification. So a round begins as soon as the one before it is over, the first one with the
first rows of the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.core.tracing import Span, Tracing
from outrider.router.flight import Step
from outrider.router.requests import FinishReason, NewRequest, RequestTrace, RoundFacts
from outrider.router.step_rows import Rows

MakeTrace = Callable[[NewRequest], RequestTrace | None]


class RoundTrace:
    """Implements ``RequestTrace`` with spans."""

    def __init__(self, tracing: Tracing, parent: str, choice: int) -> None:
        """``parent``: the request's span."""
        self._tracing = tracing
        self._parent = parent
        self._choice = choice
        self._num_rounds = 0
        self._round: Span | None = None
        self._ahead: Span | None = None  # the round after it, where a step of that is planned already
        self._decided_ns = 0

    @property
    def traceparent(self) -> str:
        return self._round.traceparent if self._round is not None else ""

    def planned(self, *, ahead: bool = False) -> str:
        if ahead:
            self._ahead = self._ahead or self._begin()
            return self._ahead.traceparent if self._ahead is not None else ""
        self._round = self._round or self._begin()
        return self.traceparent

    def decided(self) -> None:
        self._decided_ns = time.time_ns()

    def committed(self, facts: RoundFacts) -> None:
        if self._round is not None:
            now = time.time_ns()
            attributes = {
                "outrider.epoch": facts.epoch,
                "outrider.base_len": facts.base_len,
                "outrider.num_draft_tokens": facts.num_draft_tokens,
                "outrider.num_accepted_tokens": facts.num_accepted_tokens,
                "outrider.num_committed_tokens": facts.num_committed_tokens,
            }
            self._tracing.record("commit", self._round.traceparent, self._decided_ns, now, attributes)
            self._round.set({**attributes, "outrider.drafter": facts.drafter})
            self._round.end(now)
        self._round, self._ahead = self._ahead, None
        if facts.goes_on:
            self.planned()

    def ended(self, reason: FinishReason, error_message: str) -> None:
        for span in (self._round, self._ahead):
            if span is not None:
                span.set({"outrider.finish_reason": reason.name.lower()})
                if reason is FinishReason.ERROR:
                    span.fail(error_message)
                span.end()
        self._round = self._ahead = None

    def _begin(self) -> Span | None:
        self._num_rounds += 1
        attributes = {"outrider.round": self._num_rounds, "outrider.choice": self._choice}
        return self._tracing.begin("round", self._parent, attributes)


@dataclass(frozen=True)
class RoundTraces:
    """Makes the traces of requests that are traced."""

    tracing: Tracing

    def __call__(self, request: NewRequest) -> RequestTrace | None:
        if not request.traceparent:
            return None
        return RoundTrace(self.tracing, request.traceparent, request.sampling.choice)


def no_trace(request: NewRequest) -> RequestTrace | None:
    """For schedulers that trace nothing."""
    return None


def step_traces(rows: Iterable[Rows], before: Step | None) -> tuple[tuple[int, str], ...]:
    """For ``StepPlan.traces``. ``before``: the step that still runs, where this one is planned ahead of its outcome."""
    traces = []
    for part in rows:
        trace = part.request.trace
        if trace is None:
            continue
        earlier = before.rows.get(part.plan.seq_id) if before is not None else None
        parent = trace.planned(ahead=earlier is not None and bool(earlier.plan.verified_rows))
        if parent:
            traces.append((part.plan.seq_id, parent))
    return tuple(traces)

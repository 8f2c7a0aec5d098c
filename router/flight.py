"""The steps that a group was asked for and has not answered: one that runs, and at most one planned behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from outrider.core.ahead import resolve, undecided
from outrider.core.errors import GroupError
from outrider.core.plan import SequenceError, StepPlan, StepResult
from outrider.router.checks import check_result
from outrider.router.goodput import Level, Load
from outrider.router.requests import Request
from outrider.router.step_rows import Rows


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        plan: with absolute positions from the moment when the step before it is known.
        rows: what each of its sequences runs, by their id.
        started: when it could begin: when it was planned, or when the step before it was over.
        beside_drafts: whether drafts were at work when it was planned.
        load, level: what ran and how much it was to speculate when it was planned.
        dropped: sequences that do not run, since the step before left them with an error.
    """

    plan: StepPlan
    rows: dict[int, Rows]
    started: float
    beside_drafts: bool = False
    load: Load = field(default_factory=Load)
    level: Level = Level.FULL
    dropped: frozenset[int] = frozenset()

    def carries(self, request: Request) -> bool:
        rows = self.rows.get(request.seq_id)
        return rows is not None and rows.request is request


class Flight:
    """The steps in flight, in their order."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def carries(self, request: Request) -> bool:
        """Whether a step in flight may still write for this request."""
        return any(step.carries(request) for step in self._steps)

    @property
    def requests(self) -> list[Request]:
        """Requests that take part, those that have ended among them."""
        return list(dict.fromkeys(part.request for step in self._steps for part in step.rows.values()))

    def add(
        self, plan: StepPlan, rows: list[Rows], now: float, *, beside_drafts: bool, load: Load, level: Level
    ) -> None:
        self._steps.append(Step(plan, {part.plan.seq_id: part for part in rows}, now, beside_drafts, load, level))

    def clear(self) -> None:
        self._steps = []

    def land(self, result: StepResult, vocab_size: int, now: float) -> Step | None:
        """Take the step that a result answers out of the flight; None for the result of another one.

        Raises ``GroupError`` and changes nothing if the result contradicts the plan.
        """
        step = self._steps[0] if self._steps else None
        if step is None or (result.epoch, result.step) != (step.plan.epoch, step.plan.step):
            return None
        _check(step, result, vocab_size)
        self._steps = [_settled(later, step, result, now) for later in self._steps[1:]]
        return step


def _check(step: Step, result: StepResult, vocab_size: int) -> None:
    left_out = {outcome.seq_id for outcome in result.sequences if outcome.error is SequenceError.UNDECIDED}
    if left_out != step.dropped:
        raise GroupError(f"step {step.plan.step}: the group ran other sequences than those that could go on")
    run = replace(result, sequences=tuple(o for o in result.sequences if o.seq_id not in left_out))
    samplings = {seq_id: part.request.new.sampling for seq_id, part in step.rows.items()}
    check_result(step.plan, run, samplings, vocab_size)


def _settled(later: Step, step: Step, result: StepResult, now: float) -> Step:
    """A step that was planned ahead, once the one before it is known."""
    plan = resolve(later.plan, step.plan, result.sequences)
    plans = {sequence.seq_id: sequence for sequence in plan.sequences}
    rows = {i: replace(part, plan=plans[i]) if i in plans else part for i, part in later.rows.items()}
    return replace(later, plan=plan, rows=rows, started=now, dropped=frozenset(undecided(later.plan, plan)))

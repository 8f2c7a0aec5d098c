"""When the next step starts, and what it runs."""

from __future__ import annotations

from outrider.core.plan import StepPlan
from outrider.router.ahead import LEAD_S, rows_ahead
from outrider.router.batch import LimitPrompts
from outrider.router.books import Books
from outrider.router.flight import Step
from outrider.router.hearing import heard
from outrider.router.round_trace import step_traces
from outrider.router.step_cost import fair_slowdown
from outrider.router.step_rows import Rows
from outrider.router.weighing import weigh


class StepPlanner:
    """Turns the books into plans.

    Attributes:
        num_steps: plans that were made.
    """

    def __init__(self, books: Books) -> None:
        self.num_steps = 0
        self._books = books
        self._held_until: float | None = None

    def plan(self, now: float) -> StepPlan | None:
        """See ``Scheduler.schedule``."""
        books = self._books
        self._held_until = None
        weigh(books)
        if not books.requests:
            return None
        if len(books.flight):
            due = self.ahead_at()
            if due is None or now < due:
                return None
            (step,) = books.flight
            rows = rows_ahead(books.batcher, step, self._limit_prompts)
            return self._planned(rows, now, before=step) if rows else None
        self._assign(now)  # before it is decided who is waited for
        others = 1 if books.batcher.can_admit() else 0
        self._held_until = books.pacer.hold_until(books.batcher.running, others, books.drafts, now)
        if self._held_until is not None:
            return None
        resting = books.pacer.sitting_out(books.batcher.running, books.drafts, now)
        return self._planned(books.batcher.build(heard, resting, self._limit_prompts), now)

    def next_wakeup(self, now: float) -> float | None:
        """See ``Scheduler.next_wakeup``."""
        books = self._books
        times = [r.new.deadline for r in books.requests if r.new.deadline is not None]
        if not len(books.flight) and books.requests:
            times.append(now if self._held_until is None else self._held_until)
        elif (due := self.ahead_at()) is not None and due > now:
            times.append(due)
        return min(times, default=None)

    def ahead_at(self) -> float | None:
        """See ``Scheduler.ahead_at``."""
        books = self._books
        if not books.settings.plan_ahead or len(books.flight) != 1:
            return None
        (step,) = books.flight
        expected_s = books.pacer.expected_s(step.rows.values())
        return None if expected_s is None else step.started + max(0.0, expected_s - LEAD_S)

    def _planned(self, rows: list[Rows], now: float, before: Step | None = None) -> StepPlan:
        books = self._books
        self._assign(now)
        self.num_steps += 1
        plan = StepPlan(
            epoch=books.epoch,
            step=self.num_steps,
            sequences=tuple(part.plan for part in rows),
            released=books.batcher.take_released(),
            after_step=before.plan.step if before is not None else None,
            traces=step_traces(rows, before),
        )
        books.flight.add(
            plan,
            rows,
            now,
            beside_drafts=books.drafts.is_any_at_work,
            load=books.governor.load,
            level=books.governor.level,
        )
        for part in rows:
            books.counts.began(part.request, now)
        return plan

    def _assign(self, now: float) -> None:
        """Give drafts to requests that have none.

        A draft takes in a prompt while the target does. Where it would slow the target, it begins once the first token
        is there: both are done at the same time either way, and the client has that token sooner.
        """
        books, running = self._books, self._books.batcher.running
        if books.pacer.are_drafts_to_wait:
            running = [request for request in running if request.num_missing == 1]
        books.drafts.assign(running, now)

    @property
    def _limit_prompts(self) -> LimitPrompts | None:
        slowdown = self._books.settings.max_prefill_slowdown
        if not slowdown:
            return None
        return lambda rows, entering, decoding: self._books.pacer.most_prompt_rows(
            rows, fair_slowdown(slowdown, entering, decoding)
        )

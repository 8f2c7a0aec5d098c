"""When the next step starts: at once, or after a short wait for proposals that are predicted to come; and how many rows
of prompts it may have."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from outrider.core.sampling import Verifier
from outrider.router.draft_book import DraftBook
from outrider.router.goodput import StepFacts
from outrider.router.hearing import acceptance, settled
from outrider.router.policy import (
    HOLD_FRACTION,
    Arrival,
    Pace,
    StepTimes,
    averaged,
    choose_hold,
    expected_tokens,
    give_up_after,
    remaining_eta,
    should_sit_out,
    should_wait,
    steps_late,
    tokens_without_waiting,
)
from outrider.router.requests import Request
from outrider.router.step_cost import (
    CostsApart,
    StepCosts,
    most_prompt_rows,
    observed,
    seconds_like,
    seconds_of,
    seconds_within,
    typical,
)
from outrider.router.step_rows import Rows


def late_match(request: Request) -> float:
    """The chance that a proposal which comes one token late began with that very token (``policy.py``)."""
    return 0.0 if request.new.sampling.verifier is Verifier.REJECTION else request.throttle.acceptance


def _steps_late(latency: Pace, step: StepTimes) -> int:
    beside_s = latency.alone_s if latency.beside_s is None else latency.beside_s
    return steps_late(beside_s or 0.0, step.beside_s)


class Pacer:
    """Knows how long steps take and decides how long the next one is held back.

    Attributes:
        step_s: averaged time of a step without prompt chunks; None before the first.
        pace: the same, with no draft at work and beside some.
        ready_since: since when the next step could have started.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.pace = Pace()
        self.ready_since = 0.0
        self._costs = StepCosts()
        self._apart = CostsApart()

    def step_took(self, parts: Collection[Rows], seconds: float, *, beside_drafts: bool) -> None:
        """Learn from a step that ran."""
        if not parts:
            return
        if all(len(part.plan.verified_rows) == len(part.plan.tokens) for part in parts):
            self.step_s = averaged(self.step_s, seconds)
            self.pace = self.pace.took(seconds, beside=beside_drafts)
        num_rows, has_prompt = sum(len(part.plan.tokens) for part in parts), any(p.num_text_rows > 1 for p in parts)
        self._costs = observed(self._costs, num_rows, seconds, has_prompt=has_prompt)
        self._apart = self._apart.took(num_rows, seconds, has_prompt=has_prompt, beside=beside_drafts)

    @property
    def are_drafts_to_wait(self) -> bool:
        """Whether drafts had better begin with a prompt when the target is done with it."""
        return self._apart.is_slowed if self._apart.slowdown is not None else self._apart.is_alone_unknown

    def prompt_s(self, num_decoding: int, num_prompt_rows: int) -> float | None:
        """What rows of prompts cost beside ``num_decoding`` others; None where no step with about so many is known.

        While no draft is at work, where such steps are known.
        """
        num_rows = num_decoding + num_prompt_rows
        known = [costs for costs in (self._apart.alone, self._costs) if seconds_like(costs, num_rows) is not None]
        if not known:
            return None
        line = typical(known[0])
        return max(0.0, seconds_of(line, num_rows) - seconds_within(line, num_decoding))

    def expected_s(self, parts: Collection[Rows]) -> float | None:
        """How long a step with these rows takes; None where nothing like it is known."""
        if not any(part.num_text_rows > 1 for part in parts):
            return self.step_s
        line = typical(self._costs)
        return seconds_of(line, sum(len(part.plan.tokens) for part in parts)) if line else None

    def group_changed(self) -> None:
        """What was learned of the rows of steps is not true of another group."""
        self._costs = StepCosts()
        self._apart = CostsApart()

    def drafts_changed(self) -> None:
        """Other drafts may be elsewhere."""
        self._apart = CostsApart()

    def step_facts(self) -> StepFacts:
        """How long steps take by their rows."""
        line = typical(self._costs)
        seconds = (lambda rows: seconds_within(line, rows)) if line and line[0][1] > 0.0 else None
        return StepFacts(seconds, self._apart.is_slowed)

    def most_prompt_rows(self, num_decoding: int, max_slowdown: float) -> int:
        """Rows of prompts beside ``num_decoding`` others, where a step may take ``max_slowdown`` times as long."""
        return most_prompt_rows(self._costs, num_decoding, max_slowdown)

    def hold_until(self, running: Iterable[Request], others: int, drafts: DraftBook, now: float) -> float | None:
        """Until when to hold back the next step unless a proposal comes, or None to start it now.

        If everyone who could run would rather wait, as long as that pays; else for a small part of a step at most, so
        that nobody waits for a slow draft of somebody else. ``others`` requests could join the step.
        """
        step = self._step_times()
        if step is None:
            return None
        ready_tokens, arrivals, latest = float(others), [], []
        for request in running:
            k, hoped = request.num_useful_proposals, request.throttle.acceptance
            ready = settled(request)
            if ready is not None:
                num_tokens = min(k, len(ready.proposal.tokens))
                ready_tokens += expected_tokens(num_tokens, acceptance(request, ready.is_lookup))
                continue
            predicted = self._predicted(request, drafts, now)
            if predicted is not None:
                since, latency = predicted
                latency_s = latency.hoped_alone_s or 0.0  # nothing runs while the step is held back
                eta_s = remaining_eta(now - since, latency_s)
                late, num_late = late_match(request), _steps_late(latency, step)
                if should_wait(eta_s, step, k, hoped, late, num_late):
                    without = tokens_without_waiting(k, hoped, late, num_late)
                    arrivals.append(Arrival(eta_s, expected_tokens(k, hoped), without))
                    latest.append(since + give_up_after(latency_s))
                    continue
            ready_tokens += 1.0
        if not arrivals:
            return None
        limit = min(latest)
        if ready_tokens > 0.0:
            limit = min(limit, self.ready_since + HOLD_FRACTION * step.alone_s)
        return limit if choose_hold(ready_tokens, arrivals, step, limit - now) > 0.0 else None

    def sitting_out(self, running: Iterable[Request], drafts: DraftBook, now: float) -> list[Request]:
        """Requests that had better stay out of the step that starts now, as long as others run it.

        None stays out of two steps in a row: a prediction that fails costs one token.
        """
        step = self._step_times()
        if step is None:
            return []
        resting = []
        for request in running:
            predicted = None if request.sat_out or settled(request) else self._predicted(request, drafts, now)
            if predicted is not None:
                since, latency = predicted
                k, hoped = request.num_useful_proposals, request.throttle.acceptance
                eta_s = remaining_eta(now - since, latency.slowest_s or 0.0)
                if should_sit_out(eta_s, step.beside_s, k, hoped, late_match(request)):
                    resting.append(request)
        return resting

    def will_wait(self, running: Collection[Request]) -> bool:
        """Whether all would wait for what is asked of their drafts next: nothing is committed meanwhile then."""
        step = self._step_times()
        return step is not None and bool(running) and all(self._would_wait(request, step) for request in running)

    @staticmethod
    def _would_wait(request: Request, step: StepTimes) -> bool:
        session = request.session
        k, hoped = request.num_useful_proposals, request.throttle.acceptance
        if session is None or not session.is_ready or not session.is_prompt or k == 0 or not request.throttle.is_on:
            return False
        latency_s = session.latency.hoped_alone_s
        if latency_s is None:
            return False
        return should_wait(latency_s, step, k, hoped, late_match(request), _steps_late(session.latency, step))

    def _step_times(self) -> StepTimes | None:
        """None before the first step."""
        alone_s, beside_s = self.pace.hoped_alone_s, self.pace.beside_s
        if alone_s is None:
            return None
        return StepTimes(alone_s, alone_s if beside_s is None else beside_s)

    @staticmethod
    def _predicted(request: Request, drafts: DraftBook, now: float) -> tuple[float, Pace] | None:
        """Since when and for how long a proposal is predicted to take, where it could be of use."""
        if request.session is None or request.num_missing > 1 or request.num_useful_proposals == 0:
            return None
        drafts.note_overdue(request.session, now)
        return drafts.predicted(request.session)

"""How much to speculate and how long to wait: pure functions of what was observed.

Vocabulary: ``k`` proposal tokens are verified per round; ``acceptance`` is the chance that a proposal token is accepted
given that all before it were; ``step_s`` is the time of a target step; ``eta_s`` is the predicted time until a proposal
arrives. All times are in seconds.

Nothing here sees a proposal's tokens: under rejection, whether a proposal is used may depend on past commits, on
lengths and on time, never on what was drawn (docs/exactness.md).

What waiting is weighed against: a proposal asked for with ``num_tokens_to_ask`` is still useful when it comes one step
late, if it began with the token that was committed meanwhile; ``late_match`` is the chance of that. A request that goes
on without its proposal makes one token, and in the step after what the rest of the proposal is worth: over two steps
``2 + late_match * (E - 1)`` tokens with ``E = expected_tokens(k, acceptance)``; where proposals come ``n`` steps late,
over ``n + 1`` steps ``n + 1 + late_match^n * (E - 1)``. That is ``tokens_without_waiting`` a step.

Greedy and coupled targets draw with the draft's own noise, so their ``late_match`` is the acceptance. Then nobody whose
proposals come one step late waits longer than a step or sits out a step that others run, because
``E > 2 + acceptance * (E - 1)`` would need ``E > (2 - acceptance) / (1 - acceptance)``, more than E's limit of
``1 / (1 - acceptance)``. Under rejection the target draws independently of the draft, a late proposal fits by chance
only (counted as never), and both can pay: ``should_sit_out``. While no step runs, ``choose_hold`` weighs a delayed
start of the next step for all.

Drafts may share processors with the target. Then a step beside a draft at work takes longer than one alone, and so does
a proposal beside a step: who judges by what happens while nobody waits sees both at their slowest, and never finds out
that waiting pays. So both are known in two states, ``Pace``, and waiting is weighed by what holds while one waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

SMOOTHING = 0.25  # weight of the newest value in exponential averages
OVERDUE_FACTOR = 2.0  # a proposal that takes this many times its predicted time ...
OVERDUE_GRACE_S = 0.005  # ... and this much longer is not waited for
HOLD_FRACTION = 0.2  # of a step: the longest that requests which could run are held back for others
PRIOR_ACCEPTED, PRIOR_REJECTED = 2.0, 1.0  # outcomes that a request without any is credited with
SPECULATION_COST = 0.15  # extra time of a round with a proposal, as a fraction of one without
CONFIDENCE_Z = 2.0  # standard normal quantile of the one-sided bound below which speculation stops (2.3 %)
MEMORY_ROUNDS = 64  # rounds after which an outcome has lost most of its weight
FIRST_PAUSE = 32  # rounds without speculation before it is tried again
LONGEST_PAUSE = 512
KEPT_EVIDENCE = 0.75  # weight that outcomes keep over a pause
HOPED_ALONE = 0.5  # of the time that something takes beside others, where it has not been seen alone


def averaged(average: float | None, value: float) -> float:
    """Exponential average; the first value counts in full."""
    return value if average is None else average + SMOOTHING * (value - average)


@dataclass(frozen=True)
class Pace:
    """How long something takes alone and beside what may share its processors: a proposal and steps, a step and drafts.

    Attributes:
        alone_s, beside_s: averages; None where it was not seen so.
        num_beside: how often it was seen beside others since it was last alone.
    """

    alone_s: float | None = None
    beside_s: float | None = None
    num_beside: int = 0

    def took(self, seconds: float, *, beside: bool, in_vain: bool = False) -> Pace:
        """``in_vain``: it was waited for and did not come in time, so it is taken to be no faster alone."""
        if not beside:
            return Pace(averaged(self.alone_s, seconds), self.beside_s)
        num_beside = 0 if in_vain else self.num_beside + 1
        # What is long past is to be tried again.
        alone_s = seconds if in_vain else self.alone_s if num_beside < MEMORY_ROUNDS else None
        return Pace(alone_s, averaged(self.beside_s, seconds), num_beside)

    @property
    def hoped_alone_s(self) -> float | None:
        """Where that was not seen, a hope: two that share processors take at most twice as long side by side."""
        if self.alone_s is not None or self.beside_s is None:
            return self.alone_s
        return HOPED_ALONE * self.beside_s

    @property
    def slowest_s(self) -> float | None:
        return max((seconds for seconds in (self.alone_s, self.beside_s) if seconds is not None), default=None)


def num_tokens_to_ask(k: int, lag_tokens: float, maximum: int) -> int:
    """Tokens to ask of a draft whose proposals come when ``lag_tokens`` more tokens are already committed.

    The first ``lag_tokens`` of such a proposal are decided by then, so that many more are asked for, up to ``maximum``.
    """
    if k <= 0:
        return 0
    return max(0, min(k + int(lag_tokens + 0.75), maximum))


def expected_tokens(k: int, acceptance: float) -> float:
    """Mean tokens of a round, ``1 + a + ... + a^k`` (Leviathan, Kalman, Matias 2023, equation 1)."""
    return 1.0 + sum(acceptance**i for i in range(1, k + 1))


def steps_late(latency_s: float, step_s: float) -> int:
    """Steps that begin before a proposal comes that nobody waits for."""
    return max(1, math.ceil(latency_s / step_s)) if step_s > 0.0 else 1


def tokens_without_waiting(k: int, acceptance: float, late_match: float, num_late: int = 1) -> float:
    """Mean tokens of a step of a request that does not wait for its proposals and uses them so many steps late."""
    return 1.0 + late_match**num_late * (expected_tokens(k, acceptance) - 1.0) / (num_late + 1.0)


@dataclass(frozen=True)
class StepTimes:
    """How long a step takes that starts while no draft works, and one that starts beside drafts at work."""

    alone_s: float
    beside_s: float


def should_wait(eta_s: float, step: StepTimes, k: int, acceptance: float, late_match: float, num_late: int = 1) -> bool:
    """Whether waiting ``eta_s`` for a proposal gives more tokens per second than a step without it now.

    ``num_late``: steps by which proposals are late that nobody waits for.
    """
    without = tokens_without_waiting(k, acceptance, late_match, num_late)
    return expected_tokens(k, acceptance) * step.beside_s > without * (eta_s + step.alone_s)


def should_sit_out(eta_s: float, step_s: float, k: int, acceptance: float, late_match: float) -> bool:
    """Whether to stay out of one step that others run, because the proposal comes before the next one starts."""
    without = tokens_without_waiting(k, acceptance, late_match)
    return eta_s <= step_s and expected_tokens(k, acceptance) > 2.0 * without


def give_up_after(latency_s: float) -> float:
    """Time after a commit at which a proposal predicted to take ``latency_s`` is no longer waited for."""
    return OVERDUE_FACTOR * latency_s + OVERDUE_GRACE_S


def remaining_eta(elapsed_s: float, latency_s: float) -> float:
    """Predicted time until a proposal arrives; one that is overdue is predicted to come soon, not at once."""
    return max(latency_s - elapsed_s, 0.1 * latency_s + 0.0002)


@dataclass(frozen=True)
class Arrival:
    """A proposal that is predicted to come in ``eta_s``, and what the next step makes for its request."""

    eta_s: float
    tokens_with: float
    tokens_without: float


def choose_hold(ready_tokens: float, arrivals: Sequence[Arrival], step: StepTimes, longest_s: float) -> float:
    """How long to hold back the next step so that it makes the most tokens per second; 0 means: start now.

    ``ready_tokens`` are expected of the requests that wait for nothing; the hold is at most ``longest_s``. A step that
    starts when all that is predicted has come runs alone.
    """
    best_hold, best_rate = 0.0, (ready_tokens + sum(arrival.tokens_without for arrival in arrivals)) / step.beside_s
    last = max((arrival.eta_s for arrival in arrivals), default=0.0)
    for hold in sorted({arrival.eta_s for arrival in arrivals if arrival.eta_s <= longest_s}):
        tokens = ready_tokens + sum(a.tokens_with if a.eta_s <= hold else a.tokens_without for a in arrivals)
        rate = tokens / (hold + (step.alone_s if hold >= last else step.beside_s))
        if rate > best_rate:
            best_hold, best_rate = hold, rate
    return best_hold


@dataclass(frozen=True)
class Throttle:
    """What past rounds of one request say about whether its speculation pays.

    Attributes:
        accepted: proposal tokens accepted, recent rounds counting more.
        rejected: rounds that ended in a rejection, likewise.
        pause: rounds to go without speculation; 0 means that it is on.
        next_pause: length of the next pause.
    """

    accepted: float = 0.0
    rejected: float = 0.0
    pause: int = 0
    next_pause: int = FIRST_PAUSE

    @property
    def is_on(self) -> bool:
        return self.pause == 0

    @property
    def acceptance(self) -> float:
        """Posterior mean. The prior is hopeful, or a request would never wait and so never learn that waiting pays."""
        return (self.accepted + PRIOR_ACCEPTED) / (self.accepted + self.rejected + PRIOR_ACCEPTED + PRIOR_REJECTED)


def acceptance_bound(accepted: float, rejected: float) -> float:
    """Upper end of Wilson's score interval for the acceptance (Wilson 1927)."""
    trials = accepted + rejected
    if trials == 0.0:
        return 1.0
    rate, z2 = accepted / trials, CONFIDENCE_Z**2
    spread = CONFIDENCE_Z * math.sqrt(rate * (1.0 - rate) / trials + z2 / (4.0 * trials**2))
    return min(1.0, (rate + z2 / (2.0 * trials) + spread) / (1.0 + z2 / trials))


def after_round(throttle: Throttle, num_draft_tokens: int, num_accepted: int) -> Throttle:
    """The throttle after a round that verified ``num_draft_tokens`` > 0.

    Speculation pauses once even the upper bound of the acceptance leaves it slower than plain decoding. After the pause
    a few more rounds decide again; each failure doubles the pause.
    """
    decay = 1.0 - 1.0 / MEMORY_ROUNDS
    accepted = throttle.accepted * decay + num_accepted
    rejected = throttle.rejected * decay + (1 if num_accepted < num_draft_tokens else 0)
    if expected_tokens(num_draft_tokens, acceptance_bound(accepted, rejected)) - 1.0 < SPECULATION_COST:
        return Throttle(
            accepted=accepted * KEPT_EVIDENCE,
            rejected=rejected * KEPT_EVIDENCE,
            pause=throttle.next_pause,
            next_pause=min(2 * throttle.next_pause, LONGEST_PAUSE),
        )
    pays = accepted > 0 and accepted / (accepted + rejected) > SPECULATION_COST
    return Throttle(accepted, rejected, next_pause=FIRST_PAUSE if pays else throttle.next_pause)


def after_plain_round(throttle: Throttle) -> Throttle:
    """The throttle after a round without a proposal."""
    return replace(throttle, pause=throttle.pause - 1) if throttle.pause else throttle

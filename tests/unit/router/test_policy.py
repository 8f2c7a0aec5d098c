"""How much to ask for, how long to wait, when to stop speculating."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.router.policy import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MEMORY_ROUNDS,
    SPECULATION_COST,
    Arrival,
    Pace,
    StepTimes,
    Throttle,
    acceptance_bound,
    after_plain_round,
    after_round,
    averaged,
    choose_hold,
    expected_tokens,
    give_up_after,
    num_tokens_to_ask,
    remaining_eta,
    should_sit_out,
    should_wait,
    steps_late,
    tokens_without_waiting,
)


def test_a_late_draft_is_asked_for_what_it_misses() -> None:
    assert num_tokens_to_ask(4, 0.0, 16) == 4
    assert num_tokens_to_ask(4, 0.2, 16) == 4
    assert num_tokens_to_ask(4, 1.0, 16) == 5
    assert num_tokens_to_ask(4, 4.5, 16) == 9
    assert num_tokens_to_ask(4, 100.0, 16) == 16
    assert num_tokens_to_ask(4, 0.0, 2) == 2
    assert num_tokens_to_ask(0, 3.0, 16) == 0


def test_expected_tokens_is_the_closed_form_of_the_paper() -> None:
    for k in range(9):
        for acceptance in (0.0, 0.3, 0.8):
            closed = (1 - acceptance ** (k + 1)) / (1 - acceptance)
            assert expected_tokens(k, acceptance) == pytest.approx(closed)
    assert expected_tokens(4, 1.0) == 5.0


APART = StepTimes(1.0, 1.0)  # drafts and target on processors of their own


@given(st.floats(0.0, 1.0), st.integers(0, 16), st.floats(1e-4, 10.0), st.floats(1.0, 3.0), st.floats(1.0, 100.0))
def test_nobody_waits_longer_than_a_step(
    acceptance: float, k: int, step_s: float, slowdown: float, factor: float
) -> None:
    # At an acceptance of 1 a proposal is worth any number of steps; otherwise one late step is never worse.
    if acceptance < 1.0:
        step = StepTimes(step_s, slowdown * step_s)
        longest_s = 2.0 * step.beside_s - step.alone_s  # with it, two steps take no longer than two beside drafts
        assert not should_wait(factor * longest_s, step, k, acceptance, acceptance)
        assert not should_sit_out(step_s / factor, step_s, k, acceptance, acceptance)


def test_waiting_pays_for_a_good_draft_and_not_for_a_bad_one() -> None:
    assert should_wait(0.1, APART, 4, 0.8, 0.8)
    assert not should_wait(0.1, APART, 4, 0.05, 0.05)
    assert not should_wait(0.1, APART, 0, 0.8, 0.8)
    assert tokens_without_waiting(0, 0.8, 0.8) == 1.0


def test_waiting_pays_more_where_a_step_beside_a_draft_takes_longer() -> None:
    """E = 3.36 tokens with the proposal, 1.94 without."""
    assert not should_wait(0.75, APART, 4, 0.8, 0.8)
    assert should_wait(0.75, StepTimes(1.0, 1.3), 4, 0.8, 0.8)
    assert should_wait(1.24, StepTimes(1.0, 1.3), 4, 0.8, 0.8)
    assert not should_wait(1.26, StepTimes(1.0, 1.3), 4, 0.8, 0.8)


def test_a_pace_hopes_where_it_does_not_know_and_forgets_what_is_long_past() -> None:
    assert Pace().hoped_alone_s is None
    assert Pace().slowest_s is None
    pace = Pace().took(0.2, beside=True)
    assert pace.hoped_alone_s == 0.1
    assert pace.slowest_s == 0.2
    pace = pace.took(0.15, beside=False)
    assert pace == Pace(0.15, 0.2)
    assert pace.hoped_alone_s == 0.15
    for _ in range(MEMORY_ROUNDS - 1):
        pace = pace.took(0.2, beside=True)
    assert pace.hoped_alone_s == 0.15
    assert pace.took(0.2, beside=True).hoped_alone_s == pytest.approx(0.1)


def test_a_wait_in_vain_is_remembered_as_long_as_any_other() -> None:
    pace = Pace(0.1, 0.2, num_beside=3 * MEMORY_ROUNDS).took(0.5, beside=True, in_vain=True)
    for _ in range(MEMORY_ROUNDS - 1):
        assert pace.hoped_alone_s == 0.5
        pace = pace.took(0.5, beside=True)
    assert pace.took(0.5, beside=True).hoped_alone_s == pytest.approx(0.5 * pace.beside_s, rel=0.2)


def test_where_late_proposals_never_fit_waiting_pays_for_longer() -> None:
    """E = 3.36 tokens with the proposal, 1 without: worth up to 2.36 steps alone, and one step that others run."""
    assert expected_tokens(4, 0.8) == pytest.approx(3.3616)
    assert should_wait(2.3, APART, 4, 0.8, 0.0)
    assert not should_wait(2.4, APART, 4, 0.8, 0.0)
    assert should_sit_out(1.0, 1.0, 4, 0.8, 0.0)
    assert not should_sit_out(1.1, 1.0, 4, 0.8, 0.0)  # it would miss the next step as well
    assert not should_sit_out(0.5, 1.0, 4, 0.5, 0.0)  # E = 1.94: two plain steps make more


def time_of(hold: float, arrivals: list[Arrival], step: StepTimes) -> float:
    """Of a hold and the step after it, which runs beside drafts unless all have been waited for."""
    alone = hold > 0.0 and all(arrival.eta_s <= hold for arrival in arrivals)
    return hold + (step.alone_s if alone else step.beside_s)


def brute_force_hold(ready: float, arrivals: list[Arrival], step: StepTimes, longest_s: float) -> float:
    candidates = [0.0, *(a.eta_s for a in arrivals if a.eta_s <= longest_s)]

    def rate(hold: float) -> float:
        tokens = ready
        for arrival in arrivals:
            tokens += arrival.tokens_with if 0 < hold >= arrival.eta_s else arrival.tokens_without
        return tokens / time_of(hold, arrivals, step)

    return max(rate(hold) for hold in candidates)


@given(
    st.floats(0.0, 20.0),
    st.lists(st.builds(Arrival, st.floats(0.01, 2.0), st.floats(1.0, 5.0), st.just(1.0)), max_size=6),
    st.builds(StepTimes, st.floats(0.05, 2.0), st.floats(0.05, 2.0)),
    st.floats(0.0, 2.0),
)
def test_the_hold_makes_the_most_tokens_per_second(ready, arrivals, step, longest_s) -> None:
    hold = choose_hold(ready, arrivals, step, longest_s)
    assert 0.0 <= hold <= longest_s
    tokens = ready + sum(a.tokens_with if 0 < hold >= a.eta_s else a.tokens_without for a in arrivals)
    rate = tokens / time_of(hold, arrivals, step)
    assert rate == pytest.approx(brute_force_hold(ready, arrivals, step, longest_s))


def test_an_overdue_proposal_is_predicted_soon_and_given_up_later() -> None:
    assert remaining_eta(0.0, 0.1) == pytest.approx(0.1)
    assert remaining_eta(0.06, 0.1) == pytest.approx(0.04)
    assert 0.0 < remaining_eta(5.0, 0.1) < 0.02
    assert give_up_after(0.1) == pytest.approx(0.205)
    assert averaged(None, 3.0) == 3.0
    assert 1.0 < averaged(1.0, 2.0) < 2.0


def test_the_acceptance_bound_is_wilsons() -> None:
    assert acceptance_bound(0, 0) == 1.0
    assert acceptance_bound(0, 20) == pytest.approx(4 / 24)  # z²/(n + z²) where nothing was accepted
    assert acceptance_bound(10, 0) == 1.0
    # Wilson (1927) as printed: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n) with p = 0.5, n = 20, z = 2.
    assert acceptance_bound(10, 10) == pytest.approx((0.5 + 0.1 + 2 * (0.25 / 20 + 4 / 1600) ** 0.5) / 1.2)


def drive(acceptance: float, rounds: int, k: int, seed: int) -> tuple[int, Throttle]:
    """Rounds that speculated, out of so many, when each token is accepted with that probability."""
    generator = random.Random(seed)
    throttle, speculated = Throttle(), 0
    for _ in range(rounds):
        if not throttle.is_on:
            throttle = after_plain_round(throttle)
            continue
        speculated += 1
        accepted = 0
        while accepted < k and generator.random() < acceptance:
            accepted += 1
        throttle = after_round(throttle, k, accepted)
    return speculated, throttle


def test_speculation_that_cannot_pay_stops_and_is_probed_ever_more_rarely() -> None:
    speculated, throttle = drive(0.0, 2000, 4, seed=1)
    assert 20 < speculated < 100  # 5 % of the rounds, each of which costs a fraction of a step
    assert throttle.next_pause == LONGEST_PAUSE
    for seed in range(20):
        assert drive(0.03, 2000, 4, seed)[0] < 400


def test_speculation_that_pays_goes_on() -> None:
    # False alarms: the bound is looked at after each round, and a pause costs 32 rounds of gain.
    total = sum(drive(0.4, 500, 4, seed)[0] for seed in range(40))
    assert total > 0.99 * 40 * 500
    assert drive(0.8, 500, 4, seed=3)[1].next_pause == FIRST_PAUSE


def test_a_few_unlucky_rounds_do_not_stop_it() -> None:
    throttle = Throttle()
    for _ in range(15):
        throttle = after_round(throttle, 4, 0)
        assert throttle.is_on


def test_speculation_comes_back_when_the_text_becomes_easy() -> None:
    _, throttle = drive(0.0, 300, 4, seed=2)
    generator = random.Random(3)
    for _ in range(LONGEST_PAUSE + 60):
        if throttle.is_on:
            throttle = after_round(throttle, 4, 4 if generator.random() < 0.8 else 1)
        else:
            throttle = after_plain_round(throttle)
    assert throttle.is_on
    assert throttle.acceptance > SPECULATION_COST
    assert throttle.next_pause == FIRST_PAUSE


def test_the_later_a_proposal_comes_the_less_it_is_worth() -> None:
    assert steps_late(0.3, 1.0) == 1
    assert steps_late(1.0, 1.0) == 1
    assert steps_late(1.1, 1.0) == 2
    gains = [tokens_without_waiting(4, 0.8, 0.8, late) - 1.0 for late in (1, 2, 3)]
    assert gains == pytest.approx([0.8 * 2.3616 / 2, 0.64 * 2.3616 / 3, 0.512 * 2.3616 / 4])
    assert not should_wait(0.9, APART, 4, 0.8, 0.8)
    assert should_wait(0.9, APART, 4, 0.8, 0.8, num_late=2)

"""How much a loaded group speculates: what is predicted, when something is tried, and what is learned of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.router.goodput import (
    CAUTIOUS_PAUSE,
    FEWEST_ROUNDS,
    FIRST_PAUSE,
    MARGIN,
    MOST_DOUBLINGS,
    MOST_ROUNDS,
    PATIENCE,
    START_MARGIN,
    TRIAL_SHARE,
    Level,
    Load,
    Option,
    Rate,
    Round,
    Seen,
    StepFacts,
    acceptance_of,
    first_choice,
    may_be_tried,
    num_allowed,
    num_trial_rounds,
    predicted_goodput,
    size_class,
    start_margin,
)
from outrider.router.governor import Governor
from outrider.router.policy import expected_tokens

K = 4


def rate(goodput: float, rounds: int = 40, streams: int = 8) -> Rate:
    made = Rate()
    for _ in range(rounds):
        made = made.took(round(1000 * goodput) * streams, streams, 1000.0)
    return made


def test_sizes_that_are_about_the_same_are_one_class() -> None:
    classes = [size_class(count) for count in range(18)]
    assert classes == [0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 6]


def test_a_level_is_a_part_of_the_tokens() -> None:
    assert [num_allowed(5, level) for level in Level] == [0, 3, 5]
    assert [num_allowed(1, level) for level in Level] == [0, 1, 1]
    assert all(num_allowed(0, level) == 0 for level in Level)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8), st.floats(0.01, 10.0)), min_size=1, max_size=30))
def test_a_rate_lies_between_its_rounds(rounds) -> None:
    made = Rate()
    for tokens, streams, seconds in rounds:
        made = made.took(tokens, streams, seconds)
    each = [tokens / (streams * seconds) for tokens, streams, seconds in rounds]
    assert min(each) * (1 - 1e-9) <= made.goodput <= max(each) * (1 + 1e-9)
    assert made.num_rounds == len(rounds)
    assert made.goodput == pytest.approx(made.tokens_per_round / made.round_s)


def test_a_rate_forgets() -> None:
    made = Rate()
    for _ in range(500):
        made = made.took(8, 8, 1.0)
    for _ in range(150):
        made = made.took(8 * 3, 8, 1.0)
    assert made.goodput > 2.7


@settings(deadline=None)
@given(st.integers(1, 16), st.floats(0.0, 0.99))
def test_acceptance_is_found_from_what_rounds_commit(k: int, acceptance: float) -> None:
    found = acceptance_of(k, expected_tokens(k, acceptance))
    assert expected_tokens(k, found) == pytest.approx(expected_tokens(k, acceptance), abs=1e-6)


def line(rows: float) -> float:
    return 0.1 + 0.004 * max(0.0, rows - 16)


def flat(rows: float) -> float:
    return 0.1


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 16), st.floats(0.0, 0.9), st.floats(0.0, 0.5))
def test_a_prediction_for_what_was_measured_is_the_measure(
    streams: int, k: int, acceptance: float, others: float
) -> None:
    tokens, seconds = expected_tokens(k, acceptance), line(streams * (k + 1)) + others
    many = 1e9 * streams  # rounds, beside which no prior counts
    seen = Seen(streams, k, Rate(tokens * many, seconds * many, many, 10**9))
    assert predicted_goodput(seen, streams, k, line) == pytest.approx(tokens / seconds, rel=1e-5)
    more = [predicted_goodput(seen, streams * factor, k, line) for factor in (1, 2, 4, 8)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(more))


def test_rows_that_cost_nothing_promise_the_same_to_many() -> None:
    seen = Seen(1, K, Rate(3e6, 0.11e6, 1e6, 10**6))
    assert predicted_goodput(seen, 64, K, lambda rows: 0.1) == pytest.approx(3.0 / 0.11, rel=1e-3)


def test_a_lucky_round_is_no_proof() -> None:
    lucky, proven = Seen(1, K, Rate(5.0, 0.2, 1.0, 1)), Seen(1, K, Rate(500.0, 20.0, 100.0, 100))
    assert lucky.acceptance == pytest.approx(6 / 7)
    assert proven.acceptance > 0.99
    assert Seen(1, K, Rate(100.0, 20.0, 100.0, 100)).acceptance < 0.05
    assert Seen(1, K, Rate()).acceptance == pytest.approx(2 / 3)


def options(plain: float | None, full: float | None, half: float | None = None) -> dict[Level, Option]:
    made = {Level.PLAIN: Option(predicted=plain), Level.FULL: Option(predicted=full)}
    return made if half is None else {**made, Level.HALF: Option(predicted=half)}


def test_a_load_that_is_new_begins_with_speculation_unless_that_is_known_to_gain_little() -> None:
    enough = 1.0 + START_MARGIN
    assert first_choice(options(None, None)) is Level.FULL
    assert first_choice(options(1.0, None)) is Level.FULL
    assert first_choice(options(None, 0.1)) is Level.FULL
    assert first_choice(options(1.0, enough)) is Level.FULL
    assert first_choice(options(1.0, enough - 0.01)) is Level.PLAIN
    assert first_choice(options(1.0, 0.9, half=enough)) is Level.HALF
    assert first_choice(options(1.0, enough, half=enough)) is Level.FULL


def test_the_more_streams_share_processors_with_a_draft_the_more_must_be_promised() -> None:
    assert [start_margin(classes, are_slowed=False) for classes in (1, 2, 3)] == [START_MARGIN] * 3
    assert [start_margin(classes, are_slowed=True) for classes in (1, 2)] == [START_MARGIN, 2 * START_MARGIN]
    assert first_choice(options(1.0, 1.5), 0.6) is Level.PLAIN
    for are_slowed in (False, True):
        group = Group(lambda level, streams: 0.1 + 0.02 * num_allowed(K, level), step_s=flat, are_slowed=are_slowed)
        group.run(1, 30)
        group.idle()
        group.run(8, 1)
        assert (group.governor.level is Level.PLAIN) == are_slowed


def test_what_may_be_tried() -> None:
    unknown, known = Option(), Option(rate(1.0))
    assert may_be_tried(Level.PLAIN, unknown, Level.FULL, 9.0, 0)
    assert not may_be_tried(Level.PLAIN, Option(pause_s=0.1), Level.FULL, 9.0, 0)
    assert may_be_tried(Level.PLAIN, known, Level.FULL, 1.2, 0)
    assert not may_be_tried(Level.PLAIN, known, Level.FULL, 1.3, 10**6)  # it would need to be much faster than it was
    assert may_be_tried(Level.FULL, known, Level.PLAIN, 9.0, 0)  # other texts may be easier
    better = Option(rate(1.0), pause_s=1e9)
    assert may_be_tried(Level.PLAIN, better, Level.FULL, 0.9, FIRST_PAUSE)
    assert not may_be_tried(Level.PLAIN, better, Level.FULL, 0.9, FIRST_PAUSE - 1)
    assert not may_be_tried(Level.PLAIN, better, Level.FULL, 1.0 / (1.0 + MARGIN / 2), FIRST_PAUSE)
    assert may_be_tried(Level.PLAIN, Option(predicted=1.0), Level.FULL, 1.5, 0)
    assert may_be_tried(Level.HALF, Option(predicted=1.0), Level.FULL, 1.1, 0)
    assert not may_be_tried(Level.HALF, Option(predicted=1.0), Level.FULL, 1.2, 0)


def test_trials_that_fail_are_repeated_ever_later_and_cost_a_share_of_the_time() -> None:
    option = Option(rate(1.0))
    pauses = []
    for _ in range(MOST_DOUBLINGS + 3):
        option = option.waits(0.0, 2.0, failed=True)
        pauses.append(option.pause_s)
    assert pauses == [2.0 * FIRST_PAUSE * 2 ** min(i, MOST_DOUBLINGS) for i in range(MOST_DOUBLINGS + 3)]
    assert Option().waits(50.0, 1.0, failed=True).pause_s == 50.0 / TRIAL_SHARE
    assert Option(num_failures=3).waits(0.0, 1.0, failed=False).num_failures == 3


def test_a_trial_of_few_streams_takes_more_rounds() -> None:
    rounds = [num_trial_rounds(Level.FULL, streams) for streams in (1, 2, 4, 8, 64)]
    assert rounds == sorted(rounds, reverse=True)
    assert (rounds[0], rounds[-1]) == (MOST_ROUNDS, FEWEST_ROUNDS)
    assert num_trial_rounds(Level.PLAIN, 2) == FEWEST_ROUNDS


@dataclass
class Group:
    """A group without requests: rounds of all streams that commit and last as told, with noise.

    Attributes:
        costs: level and streams -> seconds of a round.
        step_s: rows -> seconds of a step.
        are_slowed: whether it is known that drafts slow the target.
        acceptance: of a token.
        catch_up: rounds without proposals, twice as long, after speculation begins.
    """

    costs: Callable[[Level, int], float]
    acceptance: float = 0.75
    noise: float = 0.0
    catch_up: int = 2
    seed: int = 0
    step_s: Callable[[float], float] = line
    are_slowed: bool = False
    governor: Governor = field(default_factory=Governor)
    rounds: list[tuple[Level, int, float]] = field(default_factory=list)  # level, tokens, seconds
    behind: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, streams: int, count: int) -> float:
        """Tokens a second."""
        first = len(self.rounds)
        for _ in range(count):
            before = self.governor.level
            level = self.governor.decide(Load(streams, streams), K, lambda: StepFacts(self.step_s, self.are_slowed))
            if before is Level.PLAIN and level is not Level.PLAIN:
                self.behind = self.catch_up
            k = num_allowed(K, level) if not self.behind else 0
            tokens = sum(self._committed(k) for _ in range(streams))
            seconds = self.costs(level, streams) * self.random.uniform(1.0 - self.noise, 1.0 + self.noise)
            if self.behind:
                self.behind, seconds = self.behind - 1, 2.0 * self.costs(Level.PLAIN, streams)
            self.rounds.append((level, tokens, seconds))
            self.governor.took(Round(Load(streams, streams), level, streams, streams if k else 0, tokens, seconds))
        return sum(tokens for _, tokens, _ in self.rounds[first:]) / sum(s for _, _, s in self.rounds[first:])

    def _committed(self, k: int) -> int:
        accepted = 0
        while accepted < k and self.random.random() < self.acceptance:
            accepted += 1
        return accepted + 1

    def idle(self) -> None:
        self.governor.decide(Load(), K, lambda: StepFacts(self.step_s, self.are_slowed))

    @property
    def num_switches(self) -> int:
        levels = [level for level, _, _ in self.rounds]
        return sum(a is not b for a, b in itertools.pairwise(levels))

    def share(self, level: Level, last: int) -> float:
        return sum(found is level for found, _, _ in self.rounds[-last:]) / last


def shared(level: Level, streams: int) -> float:
    """A draft on the target's processors: its passes come on top and grow with the streams."""
    k = num_allowed(K, level)
    return line(streams * (k + 1)) + k * (0.028 + 0.004 * streams)


def apart(level: Level, streams: int) -> float:
    """A quick draft elsewhere, and rows that cost nothing."""
    return 0.1 + 0.01 * (level is not Level.PLAIN)


def tokens_s(costs: Callable[[Level, int], float], streams: int, level: Level, acceptance: float = 0.75) -> float:
    """Of each stream."""
    return expected_tokens(num_allowed(K, level), acceptance) / costs(level, streams)


def best(costs: Callable[[Level, int], float], streams: int, acceptance: float = 0.75) -> tuple[Level, float]:
    """The level with the most tokens a second, and these."""
    found = {level: streams * tokens_s(costs, streams, level, acceptance) for level in Level}
    level = max(found, key=found.__getitem__)
    return level, found[level]


@pytest.mark.parametrize("streams", [3, 8, 13, 40])
@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize("costs", [shared, apart], ids=["shared", "apart"])
def test_the_best_level_is_found_and_trials_cost_little(costs, noise: float, streams: int) -> None:
    group = Group(costs, noise=noise)
    group.run(streams, 400)  # it may take its time to find out
    level, most = best(costs, streams)
    assert group.run(streams, 4000) > 0.97 * most
    near = [other for other in Level if streams * tokens_s(costs, streams, other) > 0.97 * most]
    assert level in near
    assert sum(group.share(other, 4000) for other in near) > 0.9
    assert group.num_switches < 4400 / 40


def test_plain_decoding_is_nearly_as_fast_as_without_drafts_from_the_start() -> None:
    group = Group(shared)
    plain = 8 / shared(Level.PLAIN, 8)
    assert best(shared, 8)[0] is Level.PLAIN
    assert group.run(8, 1500) > 0.97 * plain
    forced = 8 * expected_tokens(K, group.acceptance) / shared(Level.FULL, 8)
    assert forced < 0.85 * plain


def test_one_stream_is_left_alone() -> None:
    group = Group(lambda level, streams: 1.0 + 100.0 * (level is not Level.PLAIN))
    group.run(1, 500)
    assert group.share(Level.FULL, 500) == 1.0


def test_what_one_stream_gave_says_where_many_begin() -> None:
    """No draft takes in eight prompts to find out what could be known."""
    group = Group(shared)
    group.run(1, 10)
    group.idle()
    group.run(8, CAUTIOUS_PAUSE - 10)
    assert group.share(Level.PLAIN, CAUTIOUS_PAUSE - 10) == 1.0
    group.run(8, 100)
    assert group.share(Level.PLAIN, 100) < 1.0


def test_what_is_predicted_to_be_better_but_not_by_much_is_tried_soon() -> None:
    group = Group(lambda level, streams: 0.1 + 0.045 * num_allowed(K, level) * streams / 8, step_s=flat)
    group.governor._plain[4] = rate(10.0)
    group.governor._seen[1] = Seen(1, K, Rate(1.4e6, 0.12e6, 1e6, 10**6))  # 11.7 a second
    group.run(8, FIRST_PAUSE - 2)
    assert group.share(Level.PLAIN, FIRST_PAUSE - 2) == 1.0
    group.run(8, 30)
    assert group.share(Level.PLAIN, 30) < 0.8


def test_where_speculation_gave_much_many_begin_with_it() -> None:
    other = Group(apart, step_s=flat)
    other.run(1, 10)
    other.idle()
    other.run(8, 200)
    assert other.share(Level.FULL, 200) == 1.0


def test_changes_of_acceptance_are_followed() -> None:
    """Rows cost, so hard texts are better off without."""

    def costs(level: Level, streams: int) -> float:
        return (0.1, 0.15, 0.2)[level]

    group = Group(costs, acceptance=0.9)
    assert group.run(8, 1000) > 0.95 * best(costs, 8, 0.9)[1]
    group.acceptance = 0.2
    group.run(8, 300)
    assert group.share(Level.PLAIN, 150) > 0.9
    assert group.run(8, 1000) > 0.96 * best(costs, 8, 0.2)[1]
    group.acceptance = 0.9
    group.run(8, 64 * 2**MOST_DOUBLINGS)
    assert group.share(Level.FULL, 100) > 0.8


def test_a_slower_target_is_no_reason_to_stop() -> None:
    """Everything takes twice as long from now on, plain decoding too: it is measured anew before it is believed."""
    slow = [1.0]
    group = Group(lambda level, streams: slow[0] * (0.1, 0.11, 0.12)[level])
    group.run(8, 500)
    assert group.share(Level.FULL, 400) > 0.95
    slow[0] = 4.0
    assert group.run(8, 1000) > 0.97 * best(group.costs, 8)[1]
    assert group.share(Level.FULL, 1000) > 0.95


def test_loads_are_told_apart_and_speculation_waits_a_little_when_one_falls() -> None:
    group = Group(shared)
    group.run(2, 200)
    assert group.share(Level.FULL, 100) > 0.85
    group.run(8, 400)
    assert group.share(Level.PLAIN, 200) == 1.0
    began = len(group.rounds)
    group.run(2, 100)
    levels = [level for level, _, _ in group.rounds[began:]]
    assert levels[:PATIENCE] == [Level.PLAIN] * PATIENCE
    assert levels[PATIENCE : PATIENCE + FEWEST_ROUNDS] == [Level.FULL] * FEWEST_ROUNDS
    group.run(8, 1)
    assert group.governor.level is Level.PLAIN  # at once: drafts are not to take in what nobody wants
    group.idle()
    group.run(2, 1)
    assert group.governor.level is Level.FULL  # nobody has written anything without


def test_loads_that_change_all_the_time_do_not_make_it_flap() -> None:
    group = Group(shared)
    group.run(2, 100)
    group.run(8, 300)
    for _ in range(100):
        group.run(8, 4)
        group.run(2, 4)
    assert group.share(Level.PLAIN, 800) == 1.0


@pytest.mark.parametrize(
    ("many", "few"),
    [((9, 6), (8, 2)), ((17, 5), (16, 1)), ((17, 8), (16, 1)), ((20, 5), (12, 3)), ((12, 5), (7, 2)), ((8, 6), (0, 1))],
)
def test_loads_that_change_before_a_trial_is_over_are_learned_all_the_same(many, few) -> None:
    """A new load begins with speculation, which is slower here: it must not stay with it for ever."""
    group, turn = Group(shared), [(streams, count) for streams, count in (many, few) if streams]
    assert best(shared, many[0])[0] is Level.PLAIN
    plain_s = sum(count * shared(Level.PLAIN, streams) for streams, count in turn)
    plain = sum(streams * count for streams, count in turn) / plain_s

    def speed(num_turns: int) -> float:
        """In times of plain decoding."""
        first = len(group.rounds)
        for _ in range(num_turns):
            for streams, count in (many, few):
                group.run(streams, count) if streams else group.idle()
        rounds = group.rounds[first:]
        return sum(tokens for _, tokens, _ in rounds) / sum(seconds for _, _, seconds in rounds) / plain

    assert speed(100) > 0.9
    assert speed(300) > 0.96


def test_a_load_stays_in_its_class_until_it_is_clearly_outside() -> None:
    assert Load(17, 17).is_about(Load(16, 16).size_class)
    assert Load(16, 16).is_about(Load(17, 17).size_class)
    assert not Load(18, 18).is_about(Load(16, 16).size_class)
    assert not Load(17, 1).is_about(Load(16, 16).size_class)
    assert [count for count in range(9) if Load(count, 3).is_about(Load(3, 3).size_class)] == [2, 3, 4, 5]
    assert not Load(2, 2).is_about(Load(1, 1).size_class)
    assert not Load(1, 1).is_about(Load(2, 2).size_class)
    assert not Load(0, 0).is_about(Load(1, 1).size_class)
    for count in range(1, 70):
        assert Load(count, count).is_about(Load(count, count).size_class)


def test_requests_that_cannot_speculate_tell_what_plain_decoding_gives() -> None:
    governor = Governor()
    governor.decide(Load(8, 0), K, lambda: StepFacts(line))
    assert governor.level is Level.FULL
    for _ in range(FEWEST_ROUNDS):
        governor.took(Round(Load(8, 0), Level.FULL, 8, 0, 8, 0.1))
    governor.decide(Load(8, 8), K, lambda: StepFacts(line))
    assert governor.snapshot().goodput["plain"] == pytest.approx(10.0)


def test_why_is_told() -> None:
    group = Group(shared)
    group.run(8, 400)
    told = group.governor.snapshot()
    assert told.is_paused
    assert (told.level, told.num_streams) == ("plain", 8)
    assert told.goodput["plain"] > 1.03 * told.goodput["full"] > 0.0
    group.idle()
    told = group.governor.snapshot()
    assert (told.level, told.is_paused, told.goodput) == ("full", False, {})


def test_rounds_of_another_level_or_load_teach_nothing() -> None:
    governor = Governor()
    governor.decide(Load(8, 8), K, lambda: StepFacts(line))
    for done in (Round(Load(3, 3), Level.FULL, 3, 3, 3, 1.0), Round(Load(8, 8), Level.HALF, 8, 8, 8, 1.0)):
        for _ in range(100):
            governor.took(done)
            assert governor.decide(Load(8, 8), K, lambda: StepFacts(line)) is Level.FULL

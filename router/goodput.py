"""How much a batch speculates: what it commits per second decides (SmartSpec: Liu et al. 2024, arXiv 2406.14066).

Vocabulary: the *load* is how many streams run; the *level* says how many of a request's ``k`` proposed tokens a round
may verify: none, half of them or all; *goodput* is committed tokens per second of one stream, so that numbers of
streams which are about the same can be compared. Times are seconds.

Goodput is measured round by round, from one commit to the next: with what a round was held back for, and with what it
lost to drafts on the same processors. Rows of prompts are taken off at what they would cost beside plain decoding with
no draft at work, so that whatever a level makes them cost above that is charged to it. What was not measured at some
load is predicted from speculation at another one and from what steps with so many rows cost; and tried. A trial of
another level lasts a few rounds and decides; one that fails is repeated after a pause in which its loss becomes
``TRIAL_SHARE`` of the time, and twice as long each time.

Nothing here sees a token: past commits are counted, lengths and times are looked at (docs/exactness.md).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.router.policy import MEMORY_ROUNDS, PRIOR_ACCEPTED, PRIOR_REJECTED, expected_tokens

MARGIN = 0.03  # by which a level must be better than the present one to take its place
START_MARGIN = 0.3  # by which speculation is predicted to be better, where a load is new, to begin with it
# A level is tried where it would be better if it were faster by so much than it was when measured last ...
TRIED_WITHIN = 1.25
# ... or, where it was not, than what steps with as few rows, or speculation with other numbers of tokens, let expect.
TRIED_WITHIN_PLAIN, TRIED_WITHIN_OTHER = 1.5, 1.1
TRIAL_SAMPLES = 64  # rounds of single streams that a trial of speculation looks at ...
FEWEST_ROUNDS, MOST_ROUNDS = 8, 24  # ... and steps
TRIAL_SHARE = 0.01  # of the time that may be lost to trials of one level
FIRST_PAUSE, CAUTIOUS_PAUSE = 64, 512  # rounds before a level is tried again; before what a prediction advises against
MOST_DOUBLINGS = 5
MAX_LOST_ROUNDS = 24  # a trial that lost so much is over ...
HOPELESS = 0.8  # ... and one that gave less than so much of what it would have to, half of its rounds being done
SETTLED_PLAIN, SETTLED = 2, 16  # rounds after which a new level is measured, whether or not proposals came
PATIENCE = 8  # rounds that a lower load must last before speculation goes on
BORDER = 8  # a load that leaves its class by less than one in so many streams, or by one, still counts as one of it

StepSeconds = Callable[[float], float]  # rows of a step -> its time


@dataclass(frozen=True)
class StepFacts:
    """What is known of steps.

    Attributes:
        seconds: how long they take; None where none was seen.
        are_slowed: whether they take longer beside drafts at work.
    """

    seconds: StepSeconds | None = None
    are_slowed: bool = False


class Level(enum.IntEnum):
    PLAIN = 0
    HALF = 1
    FULL = 2


def num_allowed(k: int, level: Level) -> int:
    """Proposed tokens of a round, of ``k`` that were asked for."""
    return (0, (k + 1) // 2, k)[level]


def size_class(count: int) -> int:
    """0, 1, 2, 3 for 0, 1, 2, 3-4 and so on, up to each power of two."""
    return 1 + (count - 1).bit_length() if count > 0 else 0


def is_about(size: int, count: int) -> bool:
    """Whether a load that was of a class may still count as one of it.

    Streams that end and follow one another move a load by one or two all the time, perhaps across a border. One stream
    and none are what they are.
    """
    if size < 2 or count < 2:
        return size_class(count) == size
    lowest, highest = 2 ** (size - 2) + 1, 2 ** (size - 1)
    slack = max(1, lowest // BORDER)
    return lowest - slack <= count <= highest + slack


@dataclass(frozen=True)
class Load:
    """What runs, and what may join at once.

    Attributes:
        num_streams: all of them.
        num_drafted: those whose speculation the load decides about: it is possible, and they name no number themselves.
    """

    num_streams: int = 0
    num_drafted: int = 0

    @property
    def size_class(self) -> tuple[int, int]:
        return size_class(self.num_streams), size_class(self.num_drafted)

    def is_about(self, sizes: tuple[int, int]) -> bool:
        """Whether it may still count as one of these classes."""
        return is_about(sizes[0], self.num_streams) and is_about(sizes[1], self.num_drafted)


@dataclass(frozen=True)
class Round:
    """What a step made of streams that decoded, and how long it took from the commit before to its own.

    Attributes:
        num_streams: those that count: not such as enter a prompt, nor such as name a number of their own.
        num_proposals: of them, like the tokens.
        seconds: without what rows of prompts cost.
    """

    load: Load
    level: Level
    num_streams: int
    num_proposals: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class Rate:
    """Sums over rounds, recent ones counting more, of all streams together."""

    tokens: float = 0.0
    seconds: float = 0.0
    stream_rounds: float = 0.0
    num_rounds: int = 0

    def took(self, tokens: int, num_streams: int, seconds: float, memory: int = MEMORY_ROUNDS) -> Rate:
        """The rate after one more round of so many streams; after ``memory`` others it has lost most of its weight."""
        kept = 1.0 - 1.0 / memory
        return Rate(
            self.tokens * kept + tokens,
            self.seconds * kept + num_streams * seconds,
            self.stream_rounds * kept + num_streams,
            self.num_rounds + 1,
        )

    @property
    def goodput(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def round_s(self) -> float:
        return self.seconds / self.stream_rounds if self.stream_rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.stream_rounds if self.stream_rounds else 0.0


def acceptance_of(k: int, tokens_per_round: float) -> float:
    """The acceptance with which rounds of ``k`` proposed tokens commit so many: ``expected_tokens`` backwards."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2.0
        low, high = (middle, high) if expected_tokens(k, middle) < tokens_per_round else (low, middle)
    return high


@dataclass(frozen=True)
class Seen:
    """Speculation with ``k`` tokens as it was measured at some load."""

    num_streams: int
    k: int
    rate: Rate

    @property
    def acceptance(self) -> float:
        """Posterior mean, with what every request is credited with (``policy.py``): a lucky round is no proof."""
        found = acceptance_of(self.k, self.rate.tokens_per_round)
        num_rejected = self.rate.stream_rounds * (1.0 - found**self.k)
        trials = max(0.0, self.rate.tokens - self.rate.stream_rounds) + num_rejected
        return (found * trials + PRIOR_ACCEPTED) / (trials + PRIOR_ACCEPTED + PRIOR_REJECTED)


def predicted_goodput(seen: Seen, num_streams: int, k: int, step_s: StepSeconds) -> float:
    """Goodput with ``k`` tokens at a load where nothing was measured.

    Beside the step a round takes the time of drafts and what goes on around. That grows with the tokens asked for and,
    as drafts meet the more rows the more streams there are, like the step.
    """
    before_s, now_s = step_s(seen.num_streams * (seen.k + 1)), step_s(num_streams * (k + 1))
    others_s = max(0.0, seen.rate.round_s - before_s) * k / seen.k
    return expected_tokens(k, seen.acceptance) / (now_s + others_s * now_s / before_s)


def num_trial_rounds(level: Level, num_drafted: int) -> int:
    """Rounds that tell the goodput of a level; without speculation each stream makes one token in each."""
    if level is Level.PLAIN:
        return FEWEST_ROUNDS
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, TRIAL_SAMPLES // max(1, num_drafted)))


def verdict(rate: Rate, lost_rounds: float, against: float, num_rounds: int) -> bool | None:
    """Whether a trial of ``num_rounds`` has shown a level to be better than one that gives ``against``; None: not yet.

    ``lost_rounds``: time that it lost so far, in rounds of the other one.
    """
    if rate.num_rounds >= num_rounds:
        return rate.goodput > (1.0 + MARGIN) * against
    is_hopeless = 2 * rate.num_rounds >= num_rounds and rate.goodput < HOPELESS * against
    return False if is_hopeless or lost_rounds > MAX_LOST_ROUNDS else None


@dataclass(frozen=True)
class Option:
    """One level at one load.

    Attributes:
        pause_s: time of decoding at that load until it is tried (again).
        num_failures: trials that failed, one after the other.
        predicted: goodput where it was not measured; None: nothing is known.
    """

    rate: Rate = Rate()
    pause_s: float = 0.0
    num_failures: int = 0
    predicted: float | None = None

    @property
    def goodput(self) -> float | None:
        return self.rate.goodput if self.rate.num_rounds else self.predicted

    def waits(self, lost_s: float, round_s: float, *, failed: bool) -> Option:
        """After a trial that lost so much time against the level left for it, whose rounds take ``round_s``."""
        num_failures = min(self.num_failures + 1, MOST_DOUBLINGS + 1) if failed else self.num_failures
        pause_s = max(lost_s / TRIAL_SHARE, FIRST_PAUSE * round_s * 2 ** max(0, num_failures - 1))
        return Option(self.rate, pause_s, num_failures, self.predicted)


def may_be_tried(level: Level, option: Option, chosen: Level, goodput: float, num_rounds: int) -> bool:
    """Whether to find out about a level, ``num_rounds`` after the last trial, where the chosen one gives ``goodput``.

    How well proposals do changes with the texts, so that speculation is always worth another trial; what it is measured
    against does not change so much.
    """
    known, is_measured = option.goodput, option.rate.num_rounds > 0
    if is_measured and known is not None and known > (1.0 + MARGIN) * goodput and num_rounds >= FIRST_PAUSE:
        return True  # the chosen one has become slower
    if option.pause_s > 0.0:
        return False
    if chosen is Level.PLAIN or known is None:
        return True
    within = TRIED_WITHIN if is_measured else TRIED_WITHIN_PLAIN if level is Level.PLAIN else TRIED_WITHIN_OTHER
    return known * within >= goodput


def start_margin(num_classes: int, *, are_slowed: bool) -> float:
    """By which speculation must be predicted to be better, from what was seen at a load so many classes lower.

    What a draft on the target's processors takes from it grows with the streams, nobody knows how much.
    """
    return START_MARGIN * (num_classes if are_slowed else 1)


def first_choice(options: Mapping[Level, Option], margin: float = START_MARGIN) -> Level:
    """Where to begin at a load that is new: with speculation, unless that is known not to be better by a margin."""
    plain = options[Level.PLAIN].goodput
    known = {level: option.goodput for level, option in options.items() if level is not Level.PLAIN}
    if plain is None or any(goodput is None for goodput in known.values()):
        return Level.FULL
    best = max(known, key=lambda level: (known[level] or 0.0, level))
    return best if (known[best] or 0.0) >= (1.0 + margin) * plain else Level.PLAIN

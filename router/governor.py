"""Keeps what was learned of goodput (``goodput.py``) and says how much is speculated at the present load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.router.goodput import (
    CAUTIOUS_PAUSE,
    FEWEST_ROUNDS,
    FIRST_PAUSE,
    MARGIN,
    PATIENCE,
    SETTLED,
    SETTLED_PLAIN,
    Level,
    Load,
    Option,
    Rate,
    Round,
    Seen,
    StepFacts,
    StepSeconds,
    first_choice,
    may_be_tried,
    num_allowed,
    num_trial_rounds,
    predicted_goodput,
    start_margin,
    verdict,
)
from outrider.router.snapshots import SpeculationSnapshot

FEW_STREAMS = 2  # up to so many, what half as many tokens spare is less than chance


@dataclass(eq=False)
class _Trial:
    level: Level
    against: float  # goodput of the chosen level
    round_s: float  # of it
    rate: Rate = field(default_factory=Rate)
    lost_s: float = 0.0


@dataclass(eq=False)
class _Place:
    """What is known of one load. A trial goes on when that load is back."""

    options: dict[Level, Option]
    chosen: Level
    num_rounds: int = FIRST_PAUSE  # since the last trial
    num_settled: int = 0  # of the chosen level, likewise
    trial: _Trial | None = None


class Governor:
    """Chooses a level for each load.

    One stream alone is left to its own throttle: who waits for its draft is decided for it alone (``pacing.py``).

    Attributes:
        level: what holds now.
    """

    def __init__(self) -> None:
        self.level = Level.FULL
        self._load = Load()
        self._sizes = self._load.size_class  # what the load counts as
        self._k = 0
        self._places: dict[tuple[int, int], _Place] = {}
        self._plain: dict[int, Rate] = {}  # by classes of streams
        self._seen: dict[int, Seen] = {}  # speculation in full, likewise
        self._num_rounds = 0  # at this level, or since streams came while it was one of speculation
        self._num_stayed = 0  # rounds at this load
        self._is_settled = False
        self._patience = 0

    @property
    def load(self) -> Load:
        """What was there at the last decision."""
        return self._load

    def decide(self, load: Load, k: int, steps: Callable[[], StepFacts]) -> Level:
        """What holds from now on: call it when a step is over, and before one is planned.

        Args:
            k: tokens that requests ask for which name no number of their own.
            steps: gives what is known of steps.
        """
        if not load.is_about(self._sizes):
            falls = 0 < load.num_streams < self._load.num_streams
            self._patience = PATIENCE if falls else 0
            if not falls and self.level is not Level.PLAIN:
                self._begin_rounds()  # drafts begin with the texts of those that came
            self._sizes, self._num_stayed = load.size_class, 0
        self._load, self._k = load, k
        if load.num_drafted == 0 or load.num_streams == 1 or k == 0:
            wanted = Level.FULL
        else:
            place = self._places.get(self._sizes)
            if place is None:
                place = self._places[self._sizes] = self._new_place(load, k, steps())
            if place.trial is None and self.level is place.chosen:
                place.trial = self._next_trial(place, steps)
            wanted = place.trial.level if place.trial is not None else place.chosen
        if self.level is Level.PLAIN and wanted is not Level.PLAIN and self._patience > 0:
            wanted = Level.PLAIN
        if wanted is not self.level:
            self.level = wanted
            self._begin_rounds()
        return self.level

    def took(self, done: Round | None) -> None:
        """Learn from a round; None: of a step that tells nothing."""
        self._patience = max(0, self._patience - 1)
        if done is None:
            return
        load, level = self._load, done.level if done.load.num_drafted else Level.PLAIN
        if not done.load.is_about(self._sizes) or (level is not self.level and load.num_drafted):
            return
        self._num_rounds += 1
        self._num_stayed += 1
        self._is_settled = self._is_settled or self._settles(done, level)
        if self._is_settled:
            self._learn(level, done)
        place = self._places.get(self._sizes)
        if place is None:
            return
        place.num_rounds += 1
        place.num_settled += self._is_settled and level is place.chosen
        for other, option in place.options.items():
            place.options[other] = replace(option, pause_s=max(0.0, option.pause_s - done.seconds))
        trial = place.trial
        if trial is not None and trial.level is level:
            trial.lost_s += done.seconds - done.num_tokens / (done.num_streams * trial.against)
            if self._is_settled:
                trial.rate = trial.rate.took(done.num_tokens, done.num_streams, done.seconds)
            num_rounds = num_trial_rounds(level, load.num_drafted)
            has_won = verdict(trial.rate, trial.lost_s / trial.round_s, trial.against, num_rounds)
            if has_won is not None:
                self._end_trial(place, trial, has_won=has_won)

    def forget_speculation(self) -> None:
        """Other drafts than before may propose. What plain decoding gives is as true as it was."""
        self._places, self._seen = {}, {}
        self._begin_rounds()

    def snapshot(self) -> SpeculationSnapshot:
        load, place = self._load, self._places.get(self._sizes)
        options = self._options(place) if place is not None else {}
        known = {level.name.lower(): option.goodput for level, option in options.items()}
        goodput = {name: value for name, value in known.items() if value is not None}
        is_paused = place is not None and place.chosen is Level.PLAIN and load.num_drafted > 0
        return SpeculationSnapshot(self.level.name.lower(), is_paused, load.num_streams, goodput)

    def _begin_rounds(self) -> None:
        self._num_rounds, self._is_settled = 0, False

    def _settles(self, done: Round, level: Level) -> bool:
        """Whether what the last change of level left behind is over: from now on proposals come, or no more of them."""
        if level is Level.PLAIN:
            return self._num_rounds > SETTLED_PLAIN
        return 2 * done.num_proposals >= min(done.load.num_drafted, done.num_streams) or self._num_rounds > SETTLED

    def _learn(self, level: Level, done: Round) -> None:
        load = done.load
        streams, drafted = self._sizes
        took = (done.num_tokens, done.num_streams, done.seconds)
        if level is Level.PLAIN:
            self._plain[streams] = self._plain.get(streams, Rate()).took(*took)
            return
        if level is Level.FULL and drafted == streams:
            seen = self._seen.get(streams)
            rate = seen.rate if seen is not None else Rate()
            self._seen[streams] = Seen(load.num_streams, self._k, rate.took(*took))
        place = self._places.get(self._sizes)
        if place is not None:
            option = place.options[level]
            memory = 2 * num_trial_rounds(level, load.num_drafted)  # so that it is fit to be compared with a trial
            place.options[level] = replace(option, rate=option.rate.took(*took, memory))

    def _new_place(self, load: Load, k: int, steps: StepFacts) -> _Place:
        """A load that was never met: what is known of others says where to begin."""
        streams, _ = self._sizes
        levels = [Level.PLAIN, Level.FULL, *([Level.HALF] if load.num_streams > FEW_STREAMS and k > 1 else [])]
        place = _Place({level: Option() for level in levels}, Level.FULL)
        lower = {size: seen for size, seen in self._seen.items() if size < streams}
        nearest = max(lower, default=streams)
        if steps.seconds is not None:
            place.options[Level.PLAIN] = Option(predicted=1.0 / steps.seconds(load.num_streams))
            if lower:
                _predict(place, lower[nearest], load.num_streams, k, steps.seconds)
        options = self._options(place)
        place.chosen = first_choice(options, start_margin(streams - nearest, are_slowed=steps.are_slowed))
        if place.chosen is Level.PLAIN:
            plain = options[Level.PLAIN].goodput or 1.0
            for level, option in place.options.items():
                is_promising = option.predicted is not None and option.predicted > (1.0 + MARGIN) * plain
                pause_s = (FIRST_PAUSE if is_promising else CAUTIOUS_PAUSE) / plain
                place.options[level] = replace(option, pause_s=pause_s)
        return place

    def _options(self, place: _Place) -> dict[Level, Option]:
        """Those of the present load. Plain decoding is the same whoever could speculate."""
        plain = self._plain.get(self._sizes[0], Rate())
        return {**place.options, Level.PLAIN: replace(place.options[Level.PLAIN], rate=plain)}

    def _next_trial(self, place: _Place, steps: Callable[[], StepFacts]) -> _Trial | None:
        """The most promising level of those that may be tried, once enough is known of the chosen one."""
        load, chosen = self._load, place.chosen
        rate = self._options(place)[chosen].rate
        if (
            not self._is_settled
            or place.num_settled < num_trial_rounds(chosen, load.num_drafted)
            or rate.goodput <= 0.0
        ):
            return None
        if chosen is Level.PLAIN and self._num_stayed < FEWEST_ROUNDS:
            return None  # drafts would catch up for a load that is over soon
        step_s = steps().seconds if chosen is not Level.PLAIN else None
        if step_s is not None:
            seen = Seen(load.num_streams, num_allowed(self._k, chosen), rate)
            _predict(place, seen, load.num_streams, self._k, step_s)
            # Where as few rows were never seen: no stream is faster than among fewer.
            lower = [plain.goodput for streams, plain in self._plain.items() if streams < self._sizes[0]]
            plain = max([1.0 / step_s(load.num_streams), *lower])
            place.options[Level.PLAIN] = replace(place.options[Level.PLAIN], predicted=plain)
        options = self._options(place)
        able = [
            level
            for level, option in options.items()
            if level is not chosen and may_be_tried(level, option, chosen, rate.goodput, place.num_rounds)
        ]
        if not able:
            return None
        if Level.PLAIN in able and not options[Level.PLAIN].rate.num_rounds:
            best = Level.PLAIN  # it costs least to find out: no draft has to catch up
        else:
            best = max(able, key=lambda level: (options[level].goodput or math.inf, -level))
        return _Trial(best, rate.goodput, rate.round_s)

    def _end_trial(self, place: _Place, trial: _Trial, *, has_won: bool) -> None:
        place.trial, place.num_rounds, place.num_settled = None, 0, 0
        if trial.rate.num_rounds and trial.level is not Level.PLAIN:
            place.options[trial.level] = replace(place.options[trial.level], rate=trial.rate)
        if trial.rate.num_rounds and trial.level is Level.PLAIN:
            self._plain[self._sizes[0]] = trial.rate
        if has_won:
            place.options = {level: replace(o, num_failures=0) for level, o in place.options.items()}
            place.options[place.chosen] = place.options[place.chosen].waits(0.0, trial.round_s, failed=False)
            place.chosen = trial.level
            if trial.level is Level.PLAIN:
                # Drafts must catch up with what was written without them, before their speed can be seen again.
                pause_s = CAUTIOUS_PAUSE * trial.rate.round_s
                for level, option in place.options.items():
                    if option.goodput is not None and option.goodput < trial.rate.goodput:
                        place.options[level] = replace(option, pause_s=max(option.pause_s, pause_s))
        else:
            option = place.options[trial.level]
            place.options[trial.level] = option.waits(max(0.0, trial.lost_s), trial.round_s, failed=True)


def _predict(place: _Place, seen: Seen, num_streams: int, k: int, step_s: StepSeconds) -> None:
    """Goodput of levels of speculation from what was seen of one, perhaps at another load."""
    for level, option in place.options.items():
        if level is not Level.PLAIN:
            predicted = predicted_goodput(seen, num_streams, num_allowed(k, level), step_s)
            place.options[level] = replace(option, predicted=predicted)

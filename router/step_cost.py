"""How long a step takes, learned from the steps that ran, and how many rows of prompts it may have by that.

Pure functions. Rows are all rows of a step, times are in seconds. Prompt rows are what a step's time grows by, so they
are what running streams wait for. The time of a number of rows is read off a line through medians: a step that took
long for reasons of its own moves nothing. The line need not be straight: a few rows may cost nothing beside reading the
weights, and many more than in proportion.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.router.policy import averaged

PLAIN_KEPT = 16  # steps that are remembered: without prompt rows ...
MIXED_KEPT = 16  # ... and with some; few, since rows cost more the deeper in a text they are
MIN_PROMPT_ROWS = 16  # of a step, so that prompts advance whatever they cost
NOTABLE_SLOWDOWN = 1.2  # times as long as alone: steps beside drafts at work that share their processors
GROWTH = 2.0  # a step has at most so many times the rows of the largest one known

Point = tuple[float, float]  # rows, seconds


@dataclass(frozen=True)
class StepCosts:
    """The latest steps, oldest first: (rows, seconds)."""

    plain: tuple[Point, ...] = ()
    mixed: tuple[Point, ...] = ()


def observed(costs: StepCosts, num_rows: int, seconds: float, *, has_prompt: bool) -> StepCosts:
    """The costs after a step.

    As long as no step without prompt rows is known, the smallest one with some stands for it and is not forgotten.
    """
    if has_prompt:
        kept = costs.mixed
        if len(kept) == MIXED_KEPT:
            forgotten = 1 if not costs.plain and kept[0][0] <= min(rows for rows, _ in kept) else 0
            kept = (*kept[:forgotten], *kept[forgotten + 1 :])
        return replace(costs, mixed=(*kept, (num_rows, seconds)))
    return replace(costs, plain=(*costs.plain[1 - PLAIN_KEPT :], (num_rows, seconds)))


def most_prompt_rows(costs: StepCosts, num_decoding: int, max_slowdown: float) -> int:
    """Rows of prompts with which a step takes ``max_slowdown`` times what its ``num_decoding`` other rows take alone.

    Never fewer than ``MIN_PROMPT_ROWS``.
    """
    line, plain = typical(costs), typical(StepCosts(costs.plain))
    if not line:
        return MIN_PROMPT_ROWS
    is_known = bool(plain) and num_decoding <= plain[-1][0]
    limit = max_slowdown * seconds_of(plain if is_known else line, num_decoding)
    largest = max(rows for rows, _ in (*costs.plain, *costs.mixed))
    rows = min(rows_within(line, limit), GROWTH * largest)
    return max(MIN_PROMPT_ROWS, math.floor(rows) - num_decoding)


def fair_slowdown(max_slowdown: float, num_entering: int, num_decoding: int) -> float:
    """How many times as long a step with prompts may take: longer where many enter beside few that decode.

    Streams lose as much time to prompts in few long steps as in many short ones, only less evenly; prompts wait twice
    as long in short ones. So each that enters may have a share, as often as more enter than decode.
    """
    shares = num_entering**2 / max(1, num_decoding)
    return 1.0 + (max_slowdown - 1.0) * max(1.0, shares)


def typical(costs: StepCosts) -> list[Point]:
    """Medians of steps of about the same size (up to a power of two), by size; seconds never fall as rows grow.

    Where a larger step took less time than a smaller one, the smaller one was slow by chance.
    """
    sizes: dict[tuple[bool, int], list[Point]] = {}
    for has_prompt, steps in enumerate((costs.plain, costs.mixed)):
        for rows, seconds in steps:
            sizes.setdefault((bool(has_prompt), int(rows).bit_length()), []).append((rows, seconds))
    medians = {statistics.median(rows for rows, _ in s): statistics.median(t for _, t in s) for s in sizes.values()}
    points: list[Point] = []
    for rows, seconds in sorted(medians.items(), reverse=True):
        points.append((rows, min(seconds, points[-1][1]) if points else seconds))
    return points[::-1]


def seconds_of(line: Sequence[Point], rows: float) -> float:
    """Time of a step. Below the smallest known step it is that step's: some time is spent whatever the rows."""
    if rows <= line[0][0]:
        return line[0][1]
    (left, before), (right, after) = _around(line, next((i for i, point in enumerate(line) if point[0] >= rows), 0))
    return before + (rows - left) * (after - before) / (right - left)


def seconds_within(line: Sequence[Point], rows: float) -> float:
    """Time of a step, where fewer rows than were ever seen may take less: half of the smallest known one at least."""
    if rows >= line[0][0] or len(line) == 1:
        return seconds_of(line, rows)
    (left, before), (right, after) = line[:2]
    return max(before - (left - rows) * (after - before) / (right - left), 0.5 * before)


@dataclass(frozen=True)
class CostsApart:
    """Steps with no draft at work and steps beside some, and how they compare.

    Attributes:
        slowdown: averaged time of a step beside drafts in times of one with about as many rows alone; None: not known.
    """

    alone: StepCosts = StepCosts()
    beside: StepCosts = StepCosts()
    slowdown: float | None = None

    def took(self, num_rows: int, seconds: float, *, has_prompt: bool, beside: bool) -> CostsApart:
        """After one more step."""
        other_s = seconds_like(self.alone if beside else self.beside, num_rows)
        slowdown = self.slowdown
        if other_s and seconds > 0.0:
            slowdown = averaged(slowdown, seconds / other_s if beside else other_s / seconds)
        costs = observed(self.beside if beside else self.alone, num_rows, seconds, has_prompt=has_prompt)
        return CostsApart(self.alone, costs, slowdown) if beside else CostsApart(costs, self.beside, slowdown)

    @property
    def is_slowed(self) -> bool:
        """Whether drafts slow the target notably: they share its processors."""
        return self.slowdown is not None and self.slowdown > NOTABLE_SLOWDOWN

    @property
    def is_alone_unknown(self) -> bool:
        """Whether prompts were entered beside drafts only, and not so often that there is no other way."""
        return 0 < len(self.beside.mixed) < MIXED_KEPT and not self.alone.mixed


def seconds_like(costs: StepCosts, num_rows: int) -> float | None:
    """Time of a step of about so many rows, up to half or twice as many; None where none is known."""
    line = typical(costs)
    if not any(num_rows <= 2 * rows and rows <= 2 * num_rows for rows, _ in line):
        return None
    return seconds_of(line, num_rows)


def rows_within(line: Sequence[Point], seconds: float) -> float:
    """Most rows of a step that takes ``seconds``; infinite where time does not seem to grow with them."""
    if seconds < line[0][1]:
        return 0.0
    (left, before), (right, after) = _around(line, next((i for i, point in enumerate(line) if point[1] > seconds), 0))
    return left + (seconds - before) * (right - left) / (after - before) if after > before else math.inf


def _around(line: Sequence[Point], index: int) -> tuple[Point, Point]:
    """The points before and at an index. 0 stands for what lies beyond the last: there the whole line goes on.

    Two neighbours may be so near that their slope is noise. Where one point is known, time grows in proportion.
    """
    if index == 0:
        return (line[0] if len(line) > 1 else (0.0, 0.0)), line[-1]
    return line[index - 1], line[index]

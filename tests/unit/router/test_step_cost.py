"""Prompts that enter beside running streams: a simulated clock, of which the scheduler sees nothing but the time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.router.settings import SchedulerSettings
from outrider.router.step_cost import (
    MIN_PROMPT_ROWS,
    MIXED_KEPT,
    NOTABLE_SLOWDOWN,
    CostsApart,
    StepCosts,
    most_prompt_rows,
    observed,
    rows_within,
    seconds_like,
    seconds_of,
    seconds_within,
    typical,
)

Cost = Callable[[float], float]
SHAPES: dict[str, Callable[[float], Cost]] = {
    "in proportion": lambda slope: lambda rows: 0.1 + slope * rows,
    "free at first": lambda slope: lambda rows: 0.1 + max(0.0, slope * (rows - 24)),
    "bent": lambda slope: lambda rows: 0.1 + slope * rows + (slope * rows) ** 2,
}


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    slope=st.floats(1e-5, 5e-3),
    num_decoding=st.integers(1, 40),
    slowdown=st.floats(1.5, 4.0),
    known_and_outliers=st.sampled_from([(False, False), (True, False), (True, True)]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=80, derandomize=True)  # noise is drawn: another run must not see worse luck
def test_steps_with_prompts_take_what_they_may(shape, slope, num_decoding, slowdown, known_and_outliers, seed) -> None:
    """After some steps, with 5 % of noise, whether or not steps without prompts were seen; one in ten may be slow."""
    (knows_plain, outliers), num_steps = known_and_outliers, 0
    chance, cost, costs = random.Random(seed), SHAPES[shape](slope), StepCosts()
    plain = cost(num_decoding)

    def run(rows: int, has_prompt: bool) -> None:
        nonlocal costs, num_steps
        num_steps += 1
        slow = 8.0 if outliers and (num_steps + seed) % 10 == 0 else 1.0
        seconds = cost(rows) * chance.uniform(0.95, 1.05) * slow
        costs = observed(costs, rows, seconds, has_prompt=has_prompt)

    for _ in range(8 if knows_plain else 0):
        run(num_decoding, False)
    chunks = []
    for _ in range(60):
        chunks.append(min(4000, most_prompt_rows(costs, num_decoding, slowdown)))
        run(num_decoding + chunks[-1], True)
    assert min(chunks) >= MIN_PROMPT_ROWS
    late = chunks[30:]
    # Else the smallest steps with a prompt stand for those without, and they are told apart by powers of two.
    known = plain if knows_plain else cost(2 * (num_decoding + MIN_PROMPT_ROWS))
    over = [c for c in late if cost(num_decoding + c) > slowdown * known * 1.25 and c > MIN_PROMPT_ROWS]
    assert len(over) <= (2 if outliers else 0)
    timid = [c for c in late if c < 4000 and cost(num_decoding + 1.5 * c) < slowdown * plain]
    if knows_plain and not outliers:  # one that hits the largest step known makes it careful for a while
        assert len(timid) <= 8


def test_outliers_move_nothing() -> None:
    costs = StepCosts()
    for step in range(12):
        costs = observed(costs, 1, 9.0 if step % 4 == 0 else 0.1, has_prompt=False)
        costs = observed(costs, 65, 9.0 if step % 4 == 1 else 0.2, has_prompt=True)
    assert typical(costs) == [(1, 0.1), (65, 0.2)]
    assert most_prompt_rows(costs, 1, 2.0) == 64


def test_a_large_step_that_was_fast_tells_of_a_smaller_one_that_was_slow_by_chance() -> None:
    costs = StepCosts()
    for rows, seconds in ((1, 0.1), (40, 5.0), (80, 0.2)):
        costs = observed(costs, rows, seconds, has_prompt=rows > 1)
    assert typical(costs) == [(1, 0.1), (40, 0.2), (80, 0.2)]


def test_what_is_not_known_is_tried_carefully() -> None:
    costs = StepCosts()
    assert most_prompt_rows(costs, 1, 2.0) == MIN_PROMPT_ROWS
    costs = observed(costs, 40, 0.1, has_prompt=False)
    assert most_prompt_rows(costs, 40, 100.0) == 40  # twice the rows of the largest step known
    for rows in (40, 80):
        costs = observed(costs, rows, 0.1, has_prompt=True)
    assert most_prompt_rows(costs, 40, 2.0) == 120


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.01, 10.0)), min_size=1, max_size=40), st.floats(0.01, 50.0))
def test_time_and_rows_are_read_off_one_line(steps, seconds) -> None:
    costs = StepCosts()
    for rows, taken in steps:
        costs = observed(costs, rows, taken, has_prompt=rows % 2 == 0)
    line = typical(costs)
    assert [point[0] for point in line] == sorted({point[0] for point in line})
    assert [point[1] for point in line] == sorted(point[1] for point in line)
    rows = rows_within(line, seconds)
    if 0 < rows < float("inf"):
        assert seconds_of(line, rows) == pytest.approx(seconds, rel=1e-6)


def enter(toy, prompt_len: int, settings: SchedulerSettings, cost: Cost, num_streams: int = 2):
    """A long prompt enters beside streams: seconds of the steps while it is entered, and of those before."""
    info = toy.group_info(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=512)
    world = toy.World(info, settings)
    for index in range(num_streams):
        world.add(f"s{index}", [index, 1, 2], max_tokens=300)
    times: dict[bool, list[float]] = {False: [], True: []}
    texts_before = None
    while "long" not in world.texts or not world.texts["long"]:
        if world.num_steps == 12:
            world.add("long", [7, *range(20)] * (prompt_len // 21) + [3], max_tokens=2)
        texts_before = {name: len(text) for name, text in world.texts.items()}
        plan = world.start()
        seconds = cost(plan.num_rows)
        world.now += seconds
        world.finish()
        world.scheduler.check_integrity()
        if world.num_steps > 1:
            times[world.num_steps > 12].append(seconds)
            for name in (f"s{index}" for index in range(num_streams)):
                assert len(world.texts[name]) == texts_before[name] + 1  # a stream goes on in every step
    world.run_to_end()
    world.check_ends()
    return times[False], times[True]


def cpu(rows: float) -> float:
    """Reading the weights takes 100 ms, and so do 50 rows of arithmetic."""
    return 0.1 + 0.002 * rows


def test_a_long_prompt_does_not_stall_streams(toy) -> None:
    plain, mixed = enter(toy, 2000, SchedulerSettings(max_prefill_slowdown=2.0), cpu)
    assert max(mixed) <= 2.1 * max(plain)
    assert len(mixed) <= 60  # 52 rows would fit into every step


@pytest.mark.parametrize(("num_streams", "num_prompts"), [(1, 7), (2, 6), (6, 2)])
def test_many_prompts_do_not_wait_for_a_few_streams(toy, num_streams: int, num_prompts: int) -> None:
    info = toy.group_info(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=512)
    world = toy.World(info, SchedulerSettings(max_prefill_slowdown=2.0))
    for index in range(num_streams):
        world.add(f"s{index}", [index, 1, 2], max_tokens=300)

    def step() -> float:
        seconds = cpu(world.start().num_rows)
        world.now += seconds
        world.finish()
        world.scheduler.check_integrity()
        return seconds

    plain = max([step() for _ in range(12)][1:])
    for index in range(num_prompts):
        world.add(f"long{index}", [index, *range(20)] * 10, max_tokens=300)
    slowest, began = 0.0, world.now
    while not all(world.texts.get(f"long{index}") for index in range(num_prompts)):
        slowest = max(slowest, step())
    taken = world.now - began
    # A row takes 0.002 s beside the 0.1 s of a step, so that steps of 0.2 s have 50 rows and take twice the rows' time.
    of_rows = num_prompts * 210 * 0.002
    if num_prompts > num_streams:
        assert taken < 1.7 * of_rows
    else:
        assert slowest <= 2.1 * plain
    world.run_to_end()
    world.check_ends()


def test_without_the_limit_it_does(toy) -> None:
    plain, mixed = enter(toy, 2000, SchedulerSettings(max_prefill_slowdown=0.0), cpu)
    assert max(mixed) > 9 * max(plain)
    assert len(mixed) <= 5


def test_a_prompt_advances_however_dear_its_rows_are(toy) -> None:
    _, mixed = enter(toy, 500, SchedulerSettings(), lambda rows: 0.1 * rows)
    assert len(mixed) <= 500 / MIN_PROMPT_ROWS + 2


def test_where_nobody_decodes_a_prompt_takes_the_whole_step(toy) -> None:
    world = toy.World(toy.group_info(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=512))
    world.add("a", [1, 2], max_tokens=4)
    world.run_to_end()
    world.add("long", list(range(20)) * 40, max_tokens=2)
    assert [world.step().num_rows for _ in range(2)] == [512, 288]
    world.run_to_end()
    world.check_ends()


def test_rows_that_cost_more_the_deeper_they_are(toy) -> None:
    """Attention over what came before: the limit follows."""
    depth = 0

    def cost(rows: float) -> float:
        nonlocal depth
        depth += int(rows) if rows > 2 else 0
        return 0.1 + 0.002 * rows * (1.0 + depth / 1500)

    plain, mixed = enter(toy, 2000, SchedulerSettings(), cost)
    assert max(mixed) <= 2.3 * max(plain)
    assert mixed[-10] > 1.6 * max(plain)


def test_fewer_rows_than_were_ever_seen_may_take_less() -> None:
    line = [(40.0, 0.24), (160.0, 0.6)]
    assert seconds_of(line, 8) == 0.24
    assert seconds_within(line, 8) == pytest.approx(0.24 - 32 * 0.003)
    assert seconds_within([(40.0, 0.2), (44.0, 0.4)], 8) == 0.1  # half at least: so near, a slope may be noise
    assert seconds_within(line, 40) == 0.24
    assert seconds_within(line, 100) == seconds_of(line, 100)
    assert seconds_within([(40.0, 0.24)], 8) == 0.24


def test_only_steps_of_about_the_same_size_are_compared() -> None:
    costs = observed(StepCosts(), 8, 0.1, has_prompt=False)
    assert seconds_like(costs, 3) is None
    assert seconds_like(costs, 4) == seconds_like(costs, 8) == 0.1
    assert seconds_like(costs, 16) == pytest.approx(0.2)
    assert seconds_like(costs, 17) is None


@pytest.mark.parametrize(("slowdown", "is_slowed"), [(1.0, False), (NOTABLE_SLOWDOWN - 0.05, False), (1.6, True)])
@pytest.mark.parametrize("alone_first", [True, False])
def test_steps_beside_drafts_are_compared_with_steps_alone(slowdown: float, is_slowed, alone_first: bool) -> None:
    apart = CostsApart()
    for beside in (not alone_first, alone_first):
        assert apart.slowdown is None
        apart = apart.took(100, 0.5 * (slowdown if beside else 1.0), has_prompt=True, beside=beside)
    assert apart.slowdown == pytest.approx(slowdown)
    assert apart.is_slowed == is_slowed
    other = apart.took(5, 9.0, has_prompt=False, beside=True)  # nothing like it was seen alone
    assert other.slowdown == apart.slowdown


def test_how_long_prompts_take_alone_is_to_be_found_out_but_not_for_ever() -> None:
    apart = CostsApart()
    assert not apart.is_alone_unknown
    for count in range(1, MIXED_KEPT + 2):
        apart = apart.took(100, 0.5, has_prompt=True, beside=True)
        assert apart.is_alone_unknown == (count < MIXED_KEPT)
    assert not CostsApart().took(9, 0.5, has_prompt=True, beside=False).is_alone_unknown

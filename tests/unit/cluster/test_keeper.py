"""What dies is started again; what dies again and again is started ever more rarely."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from outrider.cluster import keeper
from outrider.core.errors import Unavailable


class Clock:
    """Time that passes in ``sleep`` and ``watch`` only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        monkeypatch.setattr(keeper.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(keeper.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def kept(clock: Clock, lives: list[float], failing_tries: int = 0) -> tuple[list[float], list[str]]:
    """Waits and reports of something that lives for each of the times, then for ever."""
    reports: list[str] = []
    left, tries = iter(lives), itertools.count()

    async def watch() -> None:
        life = next(left, None)
        if life is None:
            raise asyncio.CancelledError
        clock.now += life
        raise Unavailable("it ended")

    async def restore() -> None:
        if next(tries) < failing_tries:
            raise Unavailable("not yet")

    with pytest.raises(asyncio.CancelledError):
        await keeper.keep("it", watch, restore, reports.append)
    return clock.waits, reports


async def test_waits_double_up_to_a_bound(clock: Clock) -> None:
    waits, reports = await kept(clock, [1.0] * 9)
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0])
    assert reports == ["it ended; starting again"] * 9


async def test_a_long_life_starts_over(clock: Clock) -> None:
    waits, _ = await kept(clock, [1.0, 1.0, 31.0, 1.0])
    assert waits == pytest.approx([0.2, 0.4, 0.2, 0.4])


async def test_a_start_that_fails_is_tried_again(clock: Clock) -> None:
    waits, reports = await kept(clock, [1.0, 1.0], failing_tries=3)
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2])
    assert len(reports) == 2


async def test_other_errors_are_not_swallowed(clock: Clock) -> None:
    async def broken() -> None:
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError):
        await keeper.keep("it", broken, broken, lambda line: None)

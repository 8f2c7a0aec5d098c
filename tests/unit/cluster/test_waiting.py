"""Waiting for several things: the first error ends it, and nothing is left running."""

from __future__ import annotations

import asyncio

import pytest

from outrider.cluster.waiting import all_or_first_error, guarded


class Part:
    """An awaitable that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("broken")


async def gives(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_answers_come_in_order() -> None:
    assert await all_or_first_error(gives(1), gives(2), gives(3)) == [1, 2, 3]
    assert await all_or_first_error() == []


async def test_the_first_error_does_not_wait_for_the_others() -> None:
    part = Part()
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(all_or_first_error(part.run(), fails()), 60)
    assert part.cancelled


async def test_cancelling_ends_all_parts() -> None:
    parts = [Part(), Part()]
    task = asyncio.ensure_future(all_or_first_error(*(part.run() for part in parts)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(part.cancelled for part in parts)


async def test_a_guard_that_fails_ends_the_work() -> None:
    part = Part()
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(guarded(part.run(), fails()), 60)
    assert part.cancelled


async def test_work_that_ends_ends_the_guards() -> None:
    guard = Part()
    assert await asyncio.wait_for(guarded(gives(7), guard.run()), 60) == 7
    assert guard.cancelled


async def test_a_guard_that_ends_well_is_no_reason_to_stop() -> None:
    assert await asyncio.wait_for(guarded(asyncio.sleep(0.02, 9), gives(1)), 60) == 9

"""Several streams as one: nothing lost, nothing out of order, nothing left running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from outrider.router.merge import merged


class Stream:
    """Gives numbers when it is let; knows whether it was closed."""

    def __init__(self, items: list[object]) -> None:
        self.items = items
        self.may = asyncio.Semaphore(0)
        self.is_closed = False

    async def run(self) -> AsyncIterator[object]:
        try:
            for item in self.items:
                await self.may.acquire()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True

    def let(self, count: int = 100) -> None:
        for _ in range(count):
            self.may.release()


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_every_item_comes_with_its_stream_and_in_its_order(count: int) -> None:
    streams = [Stream(list(range(number + 1))) for number in range(count)]
    for stream in reversed(streams):
        stream.let()
    async with asyncio.timeout(60):
        got = [item async for item in merged([stream.run() for stream in streams])]
    for number in range(count):
        assert [item for which, item in got if which == number] == list(range(number + 1))
    assert all(stream.is_closed for stream in streams)


async def test_a_stream_that_waits_holds_up_no_other() -> None:
    slow, fast = Stream([1]), Stream([2, 3])
    fast.let()
    async with asyncio.timeout(60):
        items = merged([slow.run(), fast.run()])
        assert [await anext(items), await anext(items)] == [(1, 2), (1, 3)]
        slow.let()
        assert [item async for item in items] == [(0, 1)]


@pytest.mark.parametrize("count", [1, 2])
async def test_an_error_ends_all(count: int) -> None:
    streams = [Stream([ValueError("broken")]), Stream([1])][:count]
    streams[0].let()
    async with asyncio.timeout(60):
        with pytest.raises(ValueError, match="broken"):
            [item async for item in merged([stream.run() for stream in streams])]
    assert all(stream.is_closed for stream in streams)


async def test_closing_it_closes_the_streams() -> None:
    streams = [Stream([1, 2]), Stream([1, 2])]
    streams[0].let(1)
    async with asyncio.timeout(60), contextlib.aclosing(merged([stream.run() for stream in streams])) as items:
        assert await anext(items) == (0, 1)
    assert all(stream.is_closed for stream in streams)
    assert len(asyncio.all_tasks()) == 1


async def test_cancelling_its_reader_closes_the_streams() -> None:
    streams = [Stream([1]), Stream([1])]
    started = asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(merged([stream.run() for stream in streams])) as items:
            started.set()
            await anext(items)

    task = asyncio.create_task(read())
    await started.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1

"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """Each item as it comes, with the number of its stream. Ends after the last stream, or with the first error.

    At most one item of each stream waits here: a slow reader holds the streams up.
    """
    nexts: dict[asyncio.Future[Item], int] = {}

    def ask(number: int) -> None:
        nexts[asyncio.ensure_future(anext(streams[number]))] = number

    try:
        if len(streams) == 1:  # the usual case, without a task for each item
            async for item in streams[0]:
                yield 0, item
            return
        for number in range(len(streams)):
            ask(number)
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=nexts.__getitem__):
                number = nexts.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                yield number, item
                ask(number)
    finally:
        for future in nexts:
            future.cancel()
        await asyncio.gather(*nexts, return_exceptions=True)
        for stream in streams:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

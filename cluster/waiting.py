"""Waiting for several things at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def all_or_first_error(*calls: Awaitable[Any]) -> list[Any]:
    """The answers of all calls, in order; the first error at once.

    The others are cancelled then: a rank that waits for a dead one may never answer.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def guarded(work: Awaitable[Any], *guards: Awaitable[Any]) -> Any:
    """The answer of ``work``; the error of a guard that ends with one before. Whatever is left over is cancelled."""
    tasks = [asyncio.ensure_future(part) for part in (work, *guards)]
    try:
        while not tasks[0].done():
            running = [task for task in tasks if not task.done()]
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

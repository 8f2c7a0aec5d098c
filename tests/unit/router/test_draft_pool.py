"""The draft pool's bookkeeping, without drafts or a registry."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.router.draft_pool import DraftPool, KnownDraft


class EmptyRegistry:
    async def members(self, kind: str) -> dict[str, Any]:
        return {}


async def test_a_pool_that_is_cancelled_while_it_drops_a_draft_ends() -> None:
    """Else the router would wait for ever when it stops: the pool's own cancellation looks like the draft's."""
    leaving = asyncio.Event()
    closed = asyncio.Event()

    async def conversation() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            leaving.set()
            await closed.wait()

    registry: Any = EmptyRegistry()
    nobody: Any = None
    pool = DraftPool(registry, nobody, scheduler_id="s", info=nobody, poll_s=0.01)
    draft = pool.drafts["d"] = KnownDraft("d", {"address": "x"})
    draft.task = asyncio.create_task(conversation())
    await asyncio.sleep(0)
    running = asyncio.create_task(pool.run())
    async with asyncio.timeout(60):
        await leaving.wait()
    running.cancel()
    closed.set()
    await asyncio.wait([running], timeout=60)
    assert running.cancelled()

"""Following the registry: changes are seen, an outage changes nothing, and whoever follows can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Registry
from outrider.router.lease import GroupLease
from outrider.router.membership import follow_members


async def test_a_cancellation_is_never_swallowed(world: Any) -> None:
    """redis-py waits with ``asyncio.wait_for``, which in Python 3.11 may lose one that comes with the answer."""

    async def follow() -> None:
        async for _ in follow_members(world.registry, "target", 0.0):
            pass

    for round_number in range(300):
        task = asyncio.create_task(follow())
        await asyncio.sleep(0.0001 * (round_number % 20))
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.cancelled(), f"cancellation {round_number} was swallowed"


async def test_members_are_kept_while_redis_does_not_answer(world: Any, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    seen: list[dict[str, Any]] = []
    try:
        async with Registry(server.url, "t", ttl_s=600.0, timeout_s=60.0) as patient:
            await patient.announce("draft", "a", {"address": "x"})
        async with Registry(server.url, "t", ttl_s=600.0, timeout_s=0.2) as registry:

            async def follow() -> None:
                async for members in follow_members(registry, "draft", 0.02):
                    seen.append(members)

            task = asyncio.create_task(follow())
            await world.until(lambda: bool(seen), "the members are seen")
            server.stop()
            await asyncio.sleep(0.5)
            assert not task.done()
            assert seen == [{"a": {"address": "x"}}], "an outage was taken for a departure"
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        server.stop()


async def test_a_group_has_one_owner_and_the_next_one_takes_over(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupLease, "_pause_s", 0.02)
    async with Registry(redis_url, "two-owners", ttl_s=600.0) as registry:
        first, second = (GroupLease(registry, "g", owner) for owner in ("one", "two"))
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(0.1)
        assert first.is_held
        assert not waiting.done()
        await first.release()
        async with asyncio.timeout(60):
            await waiting
        assert second.is_held


async def test_an_owner_learns_that_another_one_took_the_group(
    world: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    monkeypatch.setattr(GroupLease, "_pause_s", 0.05)
    async with Registry(redis_url, "lease-test", ttl_s=600.0) as registry:
        lease = GroupLease(registry, "g", "one")
        await lease.acquire()
        keeper = asyncio.create_task(lease.keep(lost.append))
        claimed: list[int | None] = []

        async def taken() -> bool:
            """As if this process had been stopped for longer than the lease lasts."""
            await registry._redis.delete("outrider:{lease-test}:owner:g")
            claimed.append(await registry.claim_group("g", "two"))
            return claimed[-1] is not None

        await world.until(taken, "another one claims it")
        await world.until(lambda: bool(lost), "the owner learns of it")
        assert not lease.is_held
        assert claimed[-1] is not None
        assert await registry.release_group("g", "two", claimed[-1])
        await world.until(lambda: lease.is_held, "the other one gave it up")
        keeper.cancel()

"""The registry against a real redis-server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import pytest

from outrider.cluster.redis_access import RedisAccess
from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Heartbeat, Registry
from outrider.core.errors import ConfigError, Unavailable
from outrider_ports import held_port

TTL_S = 0.3  # of what is to expire
LASTING_S = 600.0  # of what must not, however long the machine stops for


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


@pytest.fixture
async def registry(redis_server: RedisServer) -> AsyncIterator[Registry]:
    async with Registry(redis_server.url, f"c-{uuid4().hex[:8]}", ttl_s=LASTING_S) as opened:
        yield opened


@pytest.fixture
async def forgetful(redis_server: RedisServer, registry: Registry) -> AsyncIterator[Registry]:
    """Of the same cluster; what it says expires soon."""
    async with Registry(redis_server.url, registry.cluster, ttl_s=TTL_S) as opened:
        yield opened


async def test_a_member_is_known_until_withdrawn(registry: Registry) -> None:
    await registry.announce("draft", "d-0", {"address": "127.0.0.1:1", "pid": 7})
    await registry.announce("draft", "d-1", {"address": "127.0.0.1:2"})
    assert await registry.members("draft") == {
        "d-0": {"address": "127.0.0.1:1", "pid": 7},
        "d-1": {"address": "127.0.0.1:2"},
    }
    assert await registry.members("target") == {}
    await registry.withdraw("draft", "d-0")
    assert set(await registry.members("draft")) == {"d-1"}
    await registry.withdraw("draft", "never-there")


async def test_a_silent_member_expires_and_its_name_is_forgotten(registry: Registry, forgetful: Registry) -> None:
    await forgetful.announce("router", "r", {"address": "x"})
    await until(lambda: _gone(registry, "r"))
    await registry.announce("router", "r", {"address": "y"})
    assert (await registry.members("router"))["r"] == {"address": "y"}


async def _gone(registry: Registry, member_id: str) -> bool:
    return member_id not in await registry.members("router")


async def test_clusters_do_not_see_each_other(redis_server: RedisServer, registry: Registry) -> None:
    await registry.announce("draft", "d", {})
    async with Registry(redis_server.url, registry.cluster + "-other") as other:
        assert await other.members("draft") == {}
        assert await other.next_epoch("g") == 1


async def test_epochs_grow_also_when_asked_for_at_once(registry: Registry) -> None:
    epochs = await asyncio.gather(*(registry.next_epoch("g") for _ in range(20)))
    assert sorted(epochs) == list(range(1, 21))
    assert await registry.next_epoch("another") == 1


async def test_one_owner_at_a_time_and_tokens_grow(registry: Registry) -> None:
    claims = await asyncio.gather(*(registry.claim_group("g", f"router-{i}") for i in range(8)))
    won = [(i, token) for i, token in enumerate(claims) if token is not None]
    assert len(won) == 1
    winner, first = won[0]
    owner = f"router-{winner}"
    assert await registry.renew_group("g", owner, first)
    assert not await registry.renew_group("g", "router-x", first)

    second = await registry.claim_group("g", owner)
    assert second is not None
    assert second > first
    assert not await registry.renew_group("g", owner, first), "the older token of the same owner no longer counts"
    assert not await registry.release_group("g", owner, first)
    assert await registry.release_group("g", owner, second)

    third = await registry.claim_group("g", "router-x")
    assert third is not None
    assert third > second


async def test_a_lease_that_is_not_renewed_goes_to_another_and_fences_the_old_owner(
    registry: Registry, forgetful: Registry
) -> None:
    assert await registry.claim_group("kept", "old") is not None
    assert await registry.claim_group("kept", "new") is None
    first = await forgetful.claim_group("g", "old:with:colons")
    assert first is not None

    taken: list[int] = []

    async def claimed() -> bool:
        token = await registry.claim_group("g", "new")
        taken.extend([token] if token else [])
        return token is not None

    await until(claimed)
    assert taken[0] > first
    assert not await registry.renew_group("g", "old:with:colons", first)
    assert not await registry.release_group("g", "old:with:colons", first)
    assert await registry.renew_group("g", "new", taken[0])


async def test_settings_are_merged(registry: Registry) -> None:
    assert await registry.get_settings() == {}
    await registry.set_settings({"num_speculative_tokens": 4, "verifier": "coupled"})
    await registry.set_settings({"num_speculative_tokens": 0})
    await registry.set_settings({})
    assert await registry.get_settings() == {"num_speculative_tokens": 0, "verifier": "coupled"}


async def test_heartbeat_outlives_the_time_to_live_and_withdraws(registry: Registry, redis_server: RedisServer) -> None:
    heartbeat = Heartbeat(redis_server.url, registry.cluster, "router", "r", {"n": 1}, ttl_s=TTL_S)
    heartbeat.start()
    try:
        key = registry._key("router", "r")

        async def renewed() -> bool:
            return await registry._redis.pttl(key) < 1000 * LASTING_S / 2

        for _ in range(3):  # each time it says what it is to live from then on
            await until(lambda: registry._redis.pexpire(key, round(1000 * LASTING_S)))
            await until(renewed)
        heartbeat.update({"n": 2})

        async def updated() -> bool:
            return (await registry.members("router")).get("r") == {"n": 2}

        await until(updated)
    finally:
        heartbeat.stop()
    assert await registry.members("router") == {}
    heartbeat.stop()


async def test_a_heartbeat_comes_back_after_redis_lost_its_data(registry: Registry, redis_server: RedisServer) -> None:
    heartbeat = Heartbeat(redis_server.url, registry.cluster, "router", "r", {}, ttl_s=TTL_S)
    heartbeat.start()
    try:
        await registry.withdraw("router", "r")

        async def back() -> bool:
            return "r" in await registry.members("router")

        await until(back)
    finally:
        heartbeat.stop()


async def test_a_dead_redis_is_named_in_one_line() -> None:
    with held_port() as port:
        url = f"redis://user:secret@127.0.0.1:{port}/0"
        async with Registry(url, "c") as registry:
            with pytest.raises(Unavailable) as caught:
                await registry.members("draft")
        line = str(caught.value)
        assert str(RedisAccess.of(url)) in line
        assert "secret" not in line
        assert "\n" not in line
        with pytest.raises(Unavailable, match="does not answer"):
            Heartbeat(url, "c", "draft", "d", {}).start()


async def test_a_redis_that_takes_the_connection_and_says_nothing_is_given_up() -> None:
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(600), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Registry(f"redis://127.0.0.1:{port}/0", "c", timeout_s=0.2) as registry:
        async with asyncio.timeout(60):
            with pytest.raises(Unavailable, match=str(port)):
                await registry.next_epoch("g")
    server.close()


async def test_a_heartbeat_survives_the_death_of_redis_and_still_stops(own_redis_server: RedisServer) -> None:
    heartbeat = Heartbeat(own_redis_server.url, "c", "draft", "d", {}, ttl_s=TTL_S)
    heartbeat.start()
    own_redis_server.stop()
    heartbeat.stop()


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://"):
        Registry("http://127.0.0.1", "c")


async def test_the_version_is_checked(registry: Registry) -> None:
    await registry.check()

"""The control connection: integers arrive whole, the dead are noticed, strangers are turned away."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from outrider.core.errors import GroupError
from outrider.workers.engine.channel import Channel

DEADLINE_S = 60.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def open_channels(pool: ThreadPoolExecutor, world_size: int) -> list[Channel]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    opening = [pool.submit(Channel, store, rank, world_size, "127.0.0.1", DEADLINE_S) for rank in range(world_size)]
    return [each.result(timeout=2 * DEADLINE_S) for each in opening]


def send_for(leader: Channel, seconds: float) -> None:
    """Send and send: the first messages to the dead may still go into a buffer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        leader.broadcast([1] * 1000, DEADLINE_S)


def test_every_rank_hears_the_same(pool: ThreadPoolExecutor) -> None:
    channels = open_channels(pool, 3)
    for values in ([], [-(2**63), 2**63 - 1], list(range(100_000))):
        waiting = [pool.submit(channel.broadcast, None, DEADLINE_S) for channel in channels[1:]]
        assert channels[0].broadcast(values, DEADLINE_S) == values
        assert [each.result(timeout=2 * DEADLINE_S) for each in waiting] == [values, values]
    for channel in channels:
        channel.close()


def test_a_follower_hears_that_the_leader_is_gone(pool: ThreadPoolExecutor) -> None:
    leader, follower = open_channels(pool, 2)
    waiting = pool.submit(follower.broadcast, None, None)
    leader.close()
    with pytest.raises(GroupError, match="rank 1 lost its control connection"):
        waiting.result(timeout=2 * DEADLINE_S)
    follower.close()


def test_the_leader_hears_that_a_follower_is_gone(pool: ThreadPoolExecutor) -> None:
    leader, follower = open_channels(pool, 2)
    follower.close()
    with pytest.raises(GroupError, match="rank 0 lost its control connection"):
        send_for(leader, DEADLINE_S)
    leader.close()


def test_waiting_ends(pool: ThreadPoolExecutor) -> None:
    leader, follower = open_channels(pool, 2)
    with pytest.raises(GroupError, match="timed out"):
        follower.broadcast(None, 0.05)
    leader.close()
    follower.close()


def test_a_stranger_does_not_take_a_place(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    opening = pool.submit(Channel, store, 0, 2, "127.0.0.1", DEADLINE_S)
    _, port, host = store.get("outrider/channel").decode().split()
    with socket.create_connection((host, int(port)), timeout=2 * DEADLINE_S) as stranger:
        stranger.sendall(b"x" * 36)
        assert stranger.recv(1) == b""
    follower = Channel(store, 1, 2, "127.0.0.1", DEADLINE_S)
    leader = opening.result(timeout=2 * DEADLINE_S)
    waiting = pool.submit(follower.broadcast, None, DEADLINE_S)
    assert leader.broadcast([5], DEADLINE_S) == [5]
    assert waiting.result(timeout=2 * DEADLINE_S) == [5]
    leader.close()
    follower.close()


@pytest.mark.parametrize("stays", [True, False])
def test_a_silent_stranger_does_not_hold_up_the_ranks(
    stays: bool, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.workers.engine.channel._HELLO_S", 0.1)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    opening = pool.submit(Channel, store, 0, 2, "127.0.0.1", DEADLINE_S)
    _, port, host = store.get("outrider/channel").decode().split()
    with socket.create_connection((host, int(port)), timeout=2 * DEADLINE_S) as stranger:
        if not stays:
            stranger.close()
        follower = Channel(store, 1, 2, "127.0.0.1", DEADLINE_S)
        leader = opening.result(timeout=2 * DEADLINE_S)
    leader.close()
    follower.close()


def test_a_rank_that_does_not_come_is_named(pool: ThreadPoolExecutor) -> None:
    with pytest.raises(GroupError, match="rank 0 could not open its control connection"):
        Channel(dist.HashStore(), 0, 2, "127.0.0.1", 0.1)

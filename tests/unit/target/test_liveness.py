"""Who of a group is alive. Each test waits for a callback with a deadline."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from outrider.core.errors import GroupError
from outrider.workers.target.liveness import Liveness

Group = tuple[list[Liveness], "queue.Queue[tuple[int, str | None]]"]


@pytest.fixture
def group() -> Iterator[Group]:
    """Three ranks that watch each other; what they hear, with None for a peaceful end."""
    heard: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def make(rank: int) -> Liveness:
        return Liveness(
            rank,
            3,
            lambda message: heard.put((rank, message)),
            lambda: heard.put((rank, None)),
            beat_s=0.05,
            silence_s=0.4,
        )

    ranks = [make(rank) for rank in range(3)]
    port = ranks[0].listen("127.0.0.1")
    threads = [
        threading.Thread(target=ranks[rank].connect, args=("127.0.0.1", port, 42, {"pid": rank}, 5.0))
        for rank in (1, 2)
    ]
    for thread in threads:
        thread.start()
    assert ranks[0].accept(42, {"pid": 0}, 5.0) == [{"pid": rank, "rank": rank} for rank in range(3)]
    for thread in threads:
        thread.join(timeout=5)
    for rank in ranks:
        rank.start()
    yield ranks, heard
    for rank in ranks:
        rank.close()


def test_quiet_while_all_live(group: Group) -> None:
    _, heard = group
    with pytest.raises(queue.Empty):
        heard.get(timeout=1.0)


def test_a_dead_rank_is_noticed_at_once(group: Group) -> None:
    ranks, heard = group
    ranks[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that was killed
    found = dict(heard.get(timeout=30) for _ in range(2))
    assert found[0] is not None
    assert "rank 1" in found[0]


def test_a_silent_rank_is_noticed(group: Group) -> None:
    ranks, heard = group
    ranks[2]._tell = lambda message: None  # type: ignore[method-assign]
    start = time.monotonic()
    assert heard.get(timeout=30) == (0, "rank 2 was silent for 0.4 s")
    assert time.monotonic() - start > 0.2


def test_a_report_reaches_the_leader_and_from_it_the_others(group: Group) -> None:
    ranks, heard = group
    ranks[1].fail("rank 1: no memory")
    assert heard.get(timeout=30) == (0, "rank 1: no memory")
    ranks[0].fail("rank 1: no memory")
    assert {heard.get(timeout=30) for _ in range(2)} == {(1, "rank 1: no memory"), (2, "rank 1: no memory")}


def test_the_leader_ends_the_group_in_peace(group: Group) -> None:
    ranks, heard = group
    ranks[0].close()
    assert {heard.get(timeout=30) for _ in range(2)} == {(1, None), (2, None)}


def test_a_rank_that_leaves_is_a_loss(group: Group) -> None:
    ranks, heard = group
    ranks[1].close()
    assert heard.get(timeout=30) == (0, "rank 1 left the group")


def test_strangers_do_not_count() -> None:
    leader = Liveness(0, 2, print, print)
    port = leader.listen("127.0.0.1")
    stranger = Liveness(1, 2, print, print)
    errors = []

    def knock() -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"hello\n")
        try:
            stranger.connect("127.0.0.1", port, 1, {}, 3.0)
        except GroupError as error:
            errors.append(str(error))

    thread = threading.Thread(target=knock)
    thread.start()
    with pytest.raises(GroupError, match=r"ranks \[1\] did not reach the leader within 1 s"):
        leader.accept(2, {}, 1.0)
    thread.join(timeout=5)
    assert len(errors) == 1
    assert "does not reach the leader" in errors[0]


@pytest.mark.parametrize("said", [b"", b"[1]\n"])
def test_a_stranger_that_is_silent_or_odd_does_not_hold_up_the_ranks(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.workers.target.liveness._HELLO_S", 0.1)
    leader, rank = Liveness(0, 2, print, print), Liveness(1, 2, print, print)
    port = leader.listen("127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(said)
        joining = threading.Thread(target=rank.connect, args=("127.0.0.1", port, 7, {}, 5.0))
        joining.start()
        assert leader.accept(7, {}, 3.0) == [{"rank": 0}, {"rank": 1}]
        joining.join(timeout=5)
    rank.close()
    leader.close()

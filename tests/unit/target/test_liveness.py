"""Who of a group is alive. Each test waits for a callback with a deadline."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from outrider.core.errors import GroupError
from outrider.workers.target.liveness import Liveness

Group = tuple[list[Liveness], "queue.Queue[tuple[int, str | None]]"]
DEADLINE_S = 60.0


class Clock:
    """What the ranks take for the time: it stands still unless a test lets it go on, however slow the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def goes_on(self, seconds: float, heard: Callable[[], list[float]]) -> None:
        """The time goes on, and whoever speaks is heard at the new one: ``heard`` says when each was heard last."""
        self.now += seconds
        deadline = time.monotonic() + DEADLINE_S
        while any(moment != self.now for moment in heard()):
            assert time.monotonic() < deadline, "a beat did not arrive"
            time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("outrider.workers.target.liveness.time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def group(clock: Clock) -> Iterator[Group]:
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
        threading.Thread(target=ranks[rank].connect, args=("127.0.0.1", port, 42, {"pid": rank}, DEADLINE_S))
        for rank in (1, 2)
    ]
    for thread in threads:
        thread.start()
    assert ranks[0].accept(42, {"pid": 0}, DEADLINE_S) == [{"pid": rank, "rank": rank} for rank in range(3)]
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    for rank in ranks:
        rank.start()
    yield ranks, heard
    for rank in ranks:
        rank.close()


def heard_at(ranks: list[Liveness], *silent: int) -> list[float]:
    """When ranks heard each other last, but for ranks that say nothing."""
    return [peer.heard for rank in ranks for peer in rank._peers if peer.rank not in silent]


def test_quiet_while_all_live(group: Group, clock: Clock) -> None:
    ranks, heard = group
    for _ in range(20):  # five times as long as a rank may be silent
        clock.goes_on(0.1, lambda: heard_at(ranks))
    assert heard.empty()


def test_a_dead_rank_is_noticed_at_once(group: Group) -> None:
    ranks, heard = group
    ranks[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that was killed
    found = dict(heard.get(timeout=DEADLINE_S) for _ in range(2))
    assert found[0] is not None
    assert "rank 1" in found[0]


def test_a_silent_rank_is_noticed(group: Group, clock: Clock) -> None:
    ranks, heard = group
    ranks[2]._tell = lambda message: None  # type: ignore[method-assign]
    for _ in range(4):
        clock.goes_on(0.1, lambda: heard_at(ranks, 2))
    assert heard.empty()
    clock.now += 0.1
    assert heard.get(timeout=DEADLINE_S) == (0, "rank 2 was silent for 0.4 s")


def test_a_report_reaches_the_leader_and_from_it_the_others(group: Group) -> None:
    ranks, heard = group
    ranks[1].fail("rank 1: no memory")
    assert heard.get(timeout=DEADLINE_S) == (0, "rank 1: no memory")
    ranks[0].fail("rank 1: no memory")
    assert {heard.get(timeout=DEADLINE_S) for _ in range(2)} == {(1, "rank 1: no memory"), (2, "rank 1: no memory")}


def test_the_leader_ends_the_group_in_peace(group: Group) -> None:
    ranks, heard = group
    ranks[0].close()
    assert {heard.get(timeout=DEADLINE_S) for _ in range(2)} == {(1, None), (2, None)}


def test_a_rank_that_leaves_is_a_loss(group: Group) -> None:
    ranks, heard = group
    ranks[1].close()
    assert heard.get(timeout=DEADLINE_S) == (0, "rank 1 left the group")


def test_strangers_do_not_count() -> None:
    leader = Liveness(0, 2, print, print)
    port = leader.listen("127.0.0.1")
    stranger = Liveness(1, 2, print, print)
    errors = []

    def knock() -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"hello\n")
        try:
            stranger.connect("127.0.0.1", port, 1, {}, DEADLINE_S)
        except GroupError as error:
            errors.append(str(error))

    thread = threading.Thread(target=knock)
    thread.start()
    with pytest.raises(GroupError, match=r"ranks \[1\] did not reach the leader within 1 s"):
        leader.accept(2, {}, 1.0)
    thread.join(timeout=DEADLINE_S)
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
        joining = threading.Thread(target=rank.connect, args=("127.0.0.1", port, 7, {}, DEADLINE_S))
        joining.start()
        assert leader.accept(7, {}, DEADLINE_S) == [{"rank": 0}, {"rank": 1}]
        joining.join(timeout=DEADLINE_S)
    rank.close()
    leader.close()

"""Hand-off in shared memory, between threads and between processes; the time it takes is printed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.core.errors import GroupError
from outrider.workers.target.channel import ChannelClosed, ShmPlanChannel, wait_until

DEADLINE_S = 60.0
ECHO = Path(__file__).with_name("echo_process.py")


@pytest.fixture
def pair() -> Iterator[tuple[ShmPlanChannel, ShmPlanChannel]]:
    leader = ShmPlanChannel.create(2, deadline_s=DEADLINE_S, capacity=16)
    other = ShmPlanChannel.open(leader.path, 1, 2, deadline_s=DEADLINE_S)
    leader.unlink()
    assert not os.path.exists(leader.path)
    yield leader, other
    other.close()
    leader.close()


Pair = tuple[ShmPlanChannel, ShmPlanChannel]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 100])
def test_arrays_of_any_length_arrive_in_order(pair: Pair, length: int) -> None:
    leader, other = pair
    sent = [np.arange(length, dtype=np.int64) + 1000 * i for i in range(5)]

    def send() -> None:
        for values in sent:
            leader.send(values)

    thread = threading.Thread(target=send)
    thread.start()
    received = [other.receive() for _ in sent]
    thread.join(timeout=DEADLINE_S)
    assert all(np.array_equal(a, b) for a, b in zip(sent, received, strict=True))


def test_a_received_array_outlives_the_next_one(pair: Pair) -> None:
    leader, other = pair
    leader.send(np.array([1, 2, 3]))
    first = other.receive()
    leader.send(np.array([4, 5, 6]))
    other.receive()
    assert first.tolist() == [1, 2, 3]


def test_a_rank_that_takes_nothing_is_noticed(pair: Pair) -> None:
    leader, _ = pair
    leader._deadline_s = 0.3
    leader.send(np.array([1]))
    start = time.monotonic()
    with pytest.raises(GroupError, match=r"ranks \[1\] did not take the last plan within 0.3 s"):
        leader.send(np.array([2]))
    assert time.monotonic() - start >= 0.3


def test_data_that_lags_behind_its_number_is_waited_for(pair: Pair) -> None:
    """A processor may show the sequence number before the data: the CRC tells."""
    leader, other = pair
    leader.send(np.array([7, 8, 9]))
    words = leader._view()
    words[leader._head + 1] = 0
    held_back = threading.Timer(0.1, words.__setitem__, args=(leader._head + 1, 8))
    held_back.start()
    assert other.receive().tolist() == [7, 8, 9]
    held_back.join()


@pytest.mark.parametrize("ending", ["abort", "close"])
def test_a_waiting_rank_can_be_stopped(pair: Pair, ending: str) -> None:
    _, other = pair
    threading.Timer(0.1, getattr(other, ending)).start()
    with pytest.raises(ChannelClosed):
        other.receive()
    with pytest.raises(ChannelClosed):
        other.receive()


def test_waiting_burns_no_core() -> None:
    used = time.thread_time()
    assert not wait_until(lambda: False, threading.Event(), 1.0)
    assert time.thread_time() - used < 0.2


def test_hand_off_between_processes() -> None:
    there = ShmPlanChannel.create(2, deadline_s=DEADLINE_S)
    back = ShmPlanChannel.create(2, deadline_s=DEADLINE_S)
    answer = ShmPlanChannel.open(back.path, 1, 2, deadline_s=DEADLINE_S)
    process = subprocess.Popen([sys.executable, str(ECHO), there.path, back.path])
    impatience = threading.Timer(DEADLINE_S, answer.abort)  # a process that does not start must not hang the test
    impatience.start()
    try:
        there.send(np.arange(1))  # the process is up
        answer.receive()
        times = []
        for round_number in range(300):
            values = np.arange(200, dtype=np.int64) + round_number
            start = time.perf_counter()
            there.send(values)
            assert np.array_equal(answer.receive(), values)
            times.append(time.perf_counter() - start)
        there.send(np.empty(0, dtype=np.int64))
        assert process.wait(timeout=60) == 0
        print(f"\nshared memory, there and back: median {1e6 * float(np.median(times)):.0f} µs")
    finally:
        impatience.cancel()
        process.kill()
        process.wait(timeout=60)
        there.close()
        back.close()

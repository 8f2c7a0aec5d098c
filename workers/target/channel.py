"""Hand-off of plans from the leader to the other ranks: one flat array of int64, in order, nothing lost.

``ShmPlanChannel`` serves ranks on one host, ``CollectivePlanChannel`` any other layout. Both end with ``ChannelClosed``
where ``abort`` was called, within a few milliseconds or, inside a collective, when the process group gives up.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from outrider.core.errors import GroupError
from outrider.workers.engine.parallel import Parallel

_SHARED = "/dev/shm"


class ChannelClosed(GroupError):
    """The channel was aborted while a rank waited."""


class PlanChannel(Protocol):
    """What both kinds offer. The leader sends, every other rank receives every array once."""

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds after which the leader must send something, be it a KEEP_ALIVE; None: never."""

    def send(self, values: np.ndarray) -> None:
        """Leader: hand ``values [n] int64`` over."""

    def receive(self) -> np.ndarray:
        """Other ranks: wait for the next array. It is the caller's own."""

    def abort(self) -> None:
        """From any thread: whoever waits gets ``ChannelClosed``."""

    def close(self) -> None:
        """Give the resources back; nobody may wait any more."""


# How an idle rank waits: (until that many seconds of waiting, sleep that long between looks). A look costs about a
# microsecond; during decoding the next plan comes within milliseconds, and an idle group wakes 200 times a second.
_BACK_OFF = ((50e-6, 0.0), (5e-3, 50e-6), (0.05, 200e-6), (1.0, 1e-3), (float("inf"), 5e-3))


def wait_until(ready: Callable[[], bool], stopped: threading.Event, deadline_s: float | None = None) -> bool:
    """Poll ``ready`` with back-off. False where ``deadline_s`` seconds passed; ``ChannelClosed`` where ``stopped``."""
    start = time.monotonic()
    stage = 0
    while not ready():
        if stopped.is_set():
            raise ChannelClosed("the plan channel was closed")
        waited = time.monotonic() - start
        if deadline_s is not None and waited > deadline_s:
            return False
        while waited > _BACK_OFF[stage][0]:
            stage += 1
        if _BACK_OFF[stage][1]:
            time.sleep(_BACK_OFF[stage][1])
    return True


# Layout of the shared segment in int64 words: sequence number, number of words that follow in this part, words of the
# whole array, CRC of the part; then one acknowledged sequence number for each rank; then the part itself.
_SEQUENCE, _PART, _TOTAL, _CRC, _ACKS = range(5)


class ShmPlanChannel:
    """A single slot in shared memory with a sequence number, acknowledged by each receiver.

    A long array goes over in parts. The sequence number is written last; as a processor with a weak memory order may
    show it before the data, a part counts as arrived only when its CRC fits.
    """

    keep_alive_s = None

    def __init__(self, path: str, memory: mmap.mmap, rank: int, world_size: int, deadline_s: float) -> None:
        self.path = path
        self._rank = rank
        self._stopped = threading.Event()
        self._deadline_s = deadline_s
        # [words] int64. It keeps the mapping alive for a thread that still looks while another one closes.
        self._words: np.ndarray | None = np.frombuffer(memory, dtype=np.int64)
        self._head = _ACKS + world_size
        self._acks = slice(_ACKS + 1, self._head)
        self._next = 1

    @classmethod
    def create(cls, world_size: int, *, deadline_s: float, capacity: int = 1 << 17) -> ShmPlanChannel:
        """Leader: a new segment for parts of ``capacity`` words.

        The others find it at ``path``; call ``unlink`` once they did. ``deadline_s`` bounds a send. Raises ``OSError``
        where shared memory has no room.
        """
        size = 8 * (_ACKS + world_size + capacity)
        handle, path = tempfile.mkstemp(prefix="outrider-plans-", dir=_SHARED if os.path.isdir(_SHARED) else None)
        try:
            os.posix_fallocate(handle, 0, size)  # a page without memory behind it would kill whoever touches it
            return cls(path, mmap.mmap(handle, size), 0, world_size, deadline_s)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)

    @classmethod
    def open(cls, path: str, rank: int, world_size: int, *, deadline_s: float) -> ShmPlanChannel:
        """Another rank: the leader's segment."""
        with open(path, "r+b") as file:
            return cls(path, mmap.mmap(file.fileno(), 0), rank, world_size, deadline_s)

    def unlink(self) -> None:
        """Leader: take the name away. The memory goes with the last process that maps it, however that one ends."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    @property
    def capacity(self) -> int:
        """Words of one part."""
        return len(self._view()) - self._head

    def _view(self) -> np.ndarray:
        if self._words is None:
            raise ChannelClosed("the plan channel was closed")
        return self._words

    def send(self, values: np.ndarray) -> None:
        capacity = self.capacity
        for start in range(0, max(len(values), 1), capacity):
            self._send_part(values[start : start + capacity], len(values))

    def _send_part(self, part: np.ndarray, total: int) -> None:
        words = self._view()
        if not wait_until(lambda: bool((words[self._acks] >= self._next - 1).all()), self._stopped, self._deadline_s):
            late = [int(rank) + 1 for rank in np.flatnonzero(words[self._acks] < self._next - 1)]
            raise GroupError(f"ranks {late} did not take the last plan within {self._deadline_s:g} s")
        words[self._head : self._head + len(part)] = part
        words[_PART], words[_TOTAL] = len(part), total
        words[_CRC] = _crc(part, self._next)
        words[_SEQUENCE] = self._next
        self._next += 1

    def receive(self) -> np.ndarray:
        first, total = self._receive_part()
        parts, have = [first], len(first)
        while have < total:
            part, _ = self._receive_part()
            parts.append(part)
            have += len(part)
        return first if len(parts) == 1 else np.concatenate(parts)

    def _receive_part(self) -> tuple[np.ndarray, int]:
        words = self._view()
        part = np.empty(0, dtype=np.int64)

        def arrived() -> bool:
            nonlocal part
            if words[_SEQUENCE] != self._next:
                return False
            part = words[self._head : self._head + int(words[_PART])].copy()
            return int(words[_CRC]) == _crc(part, self._next)

        wait_until(arrived, self._stopped)
        total = int(words[_TOTAL])
        words[_ACKS + self._rank] = self._next
        self._next += 1
        return part, total

    def abort(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._stopped.set()
        self._words = None
        if self._rank == 0:
            self.unlink()


def _crc(part: np.ndarray, sequence: int) -> int:
    return zlib.crc32(part.tobytes(), sequence & 0xFFFFFFFF)


class CollectivePlanChannel:
    """One broadcast of integers for each plan.

    A waiting rank sits inside the broadcast, so the leader has to send at least every ``keep_alive_s`` seconds: a rank
    that hears nothing for ``timeout_s`` gives up.
    """

    def __init__(self, parallel: Parallel, *, timeout_s: float) -> None:
        self._parallel = parallel
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self.keep_alive_s: float | None = timeout_s / 4

    def send(self, values: np.ndarray) -> None:
        self._broadcast(values.tolist())

    def receive(self) -> np.ndarray:
        return np.array(self._broadcast(None), dtype=np.int64)

    def _broadcast(self, values: list[int] | None) -> list[int]:
        if self._stopped.is_set():
            raise ChannelClosed("the plan channel was closed")
        try:
            return self._parallel.broadcast_ints(values, self._timeout_s)
        except GroupError as error:
            if self._stopped.is_set():
                raise ChannelClosed("the plan channel was closed") from error
            raise

    def abort(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._stopped.set()

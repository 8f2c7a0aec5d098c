"""A target rank or a draft worker in a process of its own, driven over a pipe.

``python host.py ADDRESS KIND SETTINGS``. Besides the methods of the class it answers what only tests ask.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client
from typing import Any

from outrider.cluster.config import DraftConfig, TargetConfig
from outrider.core.plan import StepPlan
from outrider.workers.draft.batcher import Batcher
from outrider.workers.draft.worker import DraftWorker
from outrider.workers.target.shard import TargetShard
from outrider.workers.target.step import Admission, Computed, Exchanged, RankStep

CALL_TIMEOUT_S = 20.0


class WatchedStep(RankStep):
    """Remembers when steps began and ended, and now and then what the cache held.

    ``num_snapshots`` times, every ``every`` steps, the keys and values that a plan declares valid are copied, with the
    tokens that they must belong to.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times: list[tuple[float, float, int, int]] = []  # begin, end, sequences, rows
        self.snapshots: list[tuple[list[int], list[Any]]] = []
        self.every = 0
        self.num_snapshots = 0
        self.extra_s = 0.0
        self.fault: Callable[[Admission, Computed], Computed] | None = None
        self._texts: dict[int, list[int]] = {}
        self._count = 0

    def admit(self, plan: StepPlan) -> Admission:
        self.times.append((time.monotonic(), 0.0, len(plan.sequences), plan.num_rows))
        admission = super().admit(plan)
        self._count += 1
        due = self.every > 0 and self._count % self.every == 0
        for sequence in admission.admitted:
            seq_id, kv_len = sequence.plan.seq_id, sequence.plan.kv_len
            text = self._texts.setdefault(seq_id, [])
            del text[kv_len:]
            if due and kv_len and len(self.snapshots) < self.num_snapshots:
                layers = self.engine.read_kv(sequence.block_table, kv_len)  # type: ignore[attr-defined]
                self.snapshots.append((list(text), [array.numpy().copy() for layer in layers for array in layer]))
            text.extend(sequence.plan.tokens)
        for seq_id in plan.released:
            self._texts.pop(seq_id, None)
        return admission

    def exchange(self, admission: Admission, computed: Computed) -> Exchanged:
        if self.fault is not None:
            computed = self.fault(admission, computed)
        exchanged = super().exchange(admission, computed)
        time.sleep(self.extra_s)
        begin, _, num_sequences, num_rows = self.times[-1]
        self.times[-1] = (begin, time.monotonic(), num_sequences, num_rows)
        return exchanged


class HostedShard(TargetShard):
    step_class = WatchedStep

    def step_times(self) -> list[tuple[float, float, int, int]]:
        """(begin, end, sequences, rows) of each step since the last call; processes of a machine share the clock."""
        step = self._watched
        times, step.times = step.times, []
        return times

    def slow_down(self, extra_s: float) -> None:
        """Make steps last longer, as those of a larger model; 0 ends it."""
        self._watched.extra_s = extra_s

    def plant(self, fault: str | None) -> None:
        """Verify wrongly from now on, as ``planted.FAULTS`` says; None ends it."""
        from outrider_testbed.planted import with_fault

        self._watched.fault = None if fault is None else partial(with_fault, fault)

    def keep_snapshots(self, every: int, count: int) -> None:
        """Copy the caches of every sequence in each ``every``-th step, until there are ``count`` copies."""
        self._watched.every, self._watched.num_snapshots, self._watched.snapshots = every, count, []

    def snapshots(self) -> list[tuple[list[int], list[Any]]]:
        return self._watched.snapshots

    def num_sequences(self) -> int:
        return len(self._watched.table)

    @property
    def _watched(self) -> WatchedStep:
        if not isinstance(self._step, WatchedStep):
            raise RuntimeError("the shard was not started")
        return self._step


class HostedDraft(DraftWorker):
    def session_tokens(self) -> list[list[int]]:
        """The committed tokens of each session."""
        return self._look(lambda b: [s.text.tokens[: s.num_committed] for s in b.sessions.values()])

    def session_caches(self) -> list[tuple[list[int], list[Any]]]:
        """For each session its tokens whose keys and values are in the cache, committed or drafted, and these."""

        def look(batcher: Batcher) -> list[tuple[list[int], list[Any]]]:
            engine = batcher._drafter.engine  # type: ignore[attr-defined]
            caches = []
            for session in batcher.sessions.values():
                layers = engine.read_kv(session.blocks, session.kv_len)
                arrays = [array.numpy().copy() for layer in layers for array in layer]
                caches.append((list(session.text.tokens[: session.kv_len]), arrays))
            return caches

        return self._look(look)

    def check_integrity(self) -> None:
        self._look(lambda batcher: batcher.check_integrity())

    def _look(self, look: Callable[[Batcher], Any]) -> Any:
        if self._compute is None:
            raise RuntimeError("the worker was not started")
        answers: list[Any] = []
        done = threading.Event()

        def call(batcher: Batcher) -> None:
            try:
                answers.append(look(batcher))
            except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
                answers.append(error)
            done.set()

        self._compute.inspect(call)
        if not done.wait(CALL_TIMEOUT_S):
            raise TimeoutError("the compute thread does not answer")
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]


def make(kind: str, settings: dict[str, Any]) -> Any:
    config = settings.pop("config")
    if kind == "target":
        return HostedShard(TargetConfig(**config), cluster="testbed", redis_url=None, **settings)
    return HostedDraft(DraftConfig(**config), cluster="testbed", redis_url=None, **settings)


def main() -> None:
    address, kind, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    worker = make(kind, settings)
    with Client(address, authkey=os.environ["OUTRIDER_TESTBED_KEY"].encode()) as connection:
        while True:
            try:
                method, args = connection.recv()
            except EOFError:
                return
            try:
                answer: tuple[str, Any] = ("ok", getattr(worker, method)(*args))
            except Exception as error:  # noqa: BLE001 - the test sees it
                answer = ("error", f"{type(error).__name__}: {error}")
            connection.send(answer)


if __name__ == "__main__":
    main()

"""The thread that runs a draft worker's steps. Messages come in through a queue and are handled between steps."""

from __future__ import annotations

import logging
import queue
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.workers.draft.batcher import Batcher
from outrider.workers.draft.messages import Command, Event, EvictionReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftStats:
    """Facts about a draft worker at one moment between two steps."""

    sessions: int = 0
    blocks: int = 0
    free_blocks: int = 0
    steps: int = 0
    step_ms_p50: float = 0.0
    proposals: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class ComputeThread:
    """Owns a batcher from ``start`` on: nobody else touches it until ``stop`` has returned.

    ``deliver`` is called in this thread with the answers of a step. If the engine fails, ``on_failure`` is called once,
    and nothing runs any more: what the cache holds is then unknown.
    """

    def __init__(
        self,
        batcher: Batcher,
        *,
        deliver: Callable[[Sequence[Event]], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._batcher = batcher
        self._deliver = deliver
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Command | Callable[[Batcher], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="draft-compute", daemon=True)
        self.stats = DraftStats()  # replaced as a whole, so that other threads may read it
        self.failure: str | None = None

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Have a message handled before the next step. Messages are handled in the order of their submission."""
        self._inbox.put(command)

    def inspect(self, look: Callable[[Batcher], None]) -> None:
        """Have a function called with the batcher between two steps, in this thread."""
        self._inbox.put(look)

    def stop(self) -> None:
        """Evict every session with SHUTDOWN and end the thread, after the step that runs now."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._handle_waiting():
                self._batcher.step()
                self._after()
            self._batcher.evict_all(EvictionReason.SHUTDOWN)
            self._after()
        except Exception as error:  # whatever a model or a device raises, the worker must say so
            logger.exception("the draft stops")
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self._on_failure(self.failure)

    def _handle_waiting(self) -> bool:
        """Handle the messages that are there, and wait for one if there is nothing else to do. False: stop."""
        block = not self._batcher.has_work
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if item is None:
                return False
            if callable(item):
                item(self._batcher)
            else:
                self._batcher.handle(item)
            block = False

    def _after(self) -> None:
        events = self._batcher.take_events()
        self.stats = snapshot(self._batcher)
        if events:
            self._deliver(events)


def snapshot(batcher: Batcher) -> DraftStats:
    return DraftStats(
        sessions=len(batcher.sessions),
        blocks=batcher.pool.num_blocks,
        free_blocks=batcher.pool.num_free,
        steps=batcher.num_steps,
        step_ms_p50=statistics.median(batcher.step_ms) if batcher.step_ms else 0.0,
        proposals=batcher.num_proposals,
        num_draft_tokens=batcher.num_draft_tokens,
        num_accepted_tokens=batcher.num_accepted_tokens,
    )

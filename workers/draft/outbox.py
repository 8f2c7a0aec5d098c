"""What waits to be written to one scheduler."""

from __future__ import annotations

import asyncio

from outrider.core.proposal import Proposal
from outrider.workers.draft.messages import Event, EvictionReason


class Outbox:
    """Answers in order, of which only the newest proposal of a session is kept: an older one is worth nothing any more.

    So a scheduler that reads slowly costs bounded memory. Used from one event loop; ``get`` by one reader.
    """

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}  # in order of arrival, keyed by a running number
        self._proposals: dict[int, int] = {}  # session id -> key of its proposal
        self._next = 0
        self._changed = asyncio.Event()
        self._closed = False
        self.error: str | None = None

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Add an answer. A session that was evicted takes its waiting proposal with it."""
        session_id = event.address.session_id
        if isinstance(event.body, Proposal | EvictionReason):
            replaced = self._proposals.pop(session_id, None)
            if replaced is not None:
                del self._events[replaced]
        if isinstance(event.body, Proposal):
            self._proposals[session_id] = self._next
        self._events[self._next] = event
        self._next += 1
        self._changed.set()

    def close(self, error: str | None = None) -> None:
        """No more answers will come; with an error, those that wait are not worth sending either."""
        if not self._closed:
            self._closed = True
            self.error = error
        self._changed.set()

    async def get(self) -> Event | None:
        """The next answer; None when the outbox is closed and empty, or closed with an error."""
        while not self._events and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None or not self._events:
            return None
        key = next(iter(self._events))
        event = self._events.pop(key)
        if self._proposals.get(event.address.session_id) == key:
            del self._proposals[event.address.session_id]
        return event

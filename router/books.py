"""What a scheduler keeps: requests, blocks, draft sessions, the steps in flight, and what it has learned."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.plan import GroupInfo
from outrider.router.batch import Batcher
from outrider.router.counts import SchedulerCounts
from outrider.router.draft_book import DraftBook
from outrider.router.drafts import DraftFacts
from outrider.router.families import RequestBook
from outrider.router.flight import Flight
from outrider.router.governor import Governor
from outrider.router.pacing import Pacer
from outrider.router.settings import SchedulerSettings


@dataclass(eq=False)
class Books:
    """Shared by those who plan steps (``planning.py``) and take in their results (``outcomes.py``)."""

    info: GroupInfo
    settings: SchedulerSettings
    epoch: int
    batcher: Batcher
    requests: RequestBook = field(default_factory=RequestBook)
    drafts: DraftBook = field(default_factory=DraftBook)
    flight: Flight = field(default_factory=Flight)
    pacer: Pacer = field(default_factory=Pacer)
    governor: Governor = field(default_factory=Governor)
    known_drafts: set[DraftFacts] = field(default_factory=set)  # that ever joined
    counts: SchedulerCounts = field(default_factory=SchedulerCounts)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books do not balance."""
        requests, flight = self.requests, self.flight
        self.batcher.check_integrity([request for request in flight.requests if request.ended])
        known = [*self.batcher.waiting, *self.batcher.running]
        if len(known) != len(requests) or any(requests.find(r.new.request_id, r.choice) is not r for r in known):
            raise AssertionError("a request is in no queue, or in two")
        sessions = [s for draft in self.drafts.drafts.values() for s in draft.sessions.values()]
        if any(session.request.session is not session or session.request.ended for session in sessions):
            raise AssertionError("a draft session whose request has ended or has another one")
        if len(sessions) != sum(request.session is not None for request in known):
            raise AssertionError("a request whose draft session is not in the books")
        if len(flight) > 2:
            raise AssertionError(f"{len(flight)} steps are in flight")

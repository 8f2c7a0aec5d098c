"""Whether what a scheduler holds belongs together: requests, blocks, draft sessions and the steps in flight."""

from __future__ import annotations

from outrider.router.batch import Batcher
from outrider.router.draft_book import DraftBook
from outrider.router.families import RequestBook
from outrider.router.flight import Flight


def check_books(requests: RequestBook, batcher: Batcher, drafts: DraftBook, flight: Flight) -> None:
    """Raise ``AssertionError`` if the books do not balance."""
    batcher.check_integrity([request for request in flight.requests if request.ended])
    known = [*batcher.waiting, *batcher.running]
    if len(known) != len(requests) or any(requests.find(r.new.request_id, r.choice) is not r for r in known):
        raise AssertionError("a request is in no queue, or in two")
    sessions = [s for draft in drafts.drafts.values() for s in draft.sessions.values()]
    if any(session.request.session is not session or session.request.ended for session in sessions):
        raise AssertionError("a draft session whose request has ended or has another one")
    if len(sessions) != sum(request.session is not None for request in known):
        raise AssertionError("a request whose draft session is not in the books")
    if len(flight) > 2:
        raise AssertionError(f"{len(flight)} steps are in flight")

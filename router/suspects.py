"""Requests whose steps the group did not survive.

A request that makes a target fail would do so for ever, and stop all others with it: after each rebuild it runs again.
So one that was in flight at two failures runs alone until it has written more than before; if the group fails even
then, the request ends with an error and the others go on. One that gets past that point shares steps again.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.router.requests import Request

SUSPECT_AFTER = 2  # failures with a request in flight, after which it runs alone
GUILTY_AFTER = 3


def group_failed(in_flight: Sequence[Request]) -> list[Request]:
    """Note that the group failed in a step with these requests; returns those that are to end."""
    guilty = []
    for request in in_flight:
        request.num_failures += 1
        request.failed_at = len(request.text)
        if request.runs_alone and len(in_flight) == 1 and request.num_failures >= GUILTY_AFTER:
            guilty.append(request)
        request.runs_alone = request.num_failures >= SUSPECT_AFTER
    return guilty


def progressed(request: Request) -> None:
    """A request has written something: a step that failed before did not fail this time."""
    if request.runs_alone and len(request.text) > request.failed_at:
        request.runs_alone = False


def failure_message(request: Request) -> str:
    """Why a request ended."""
    times = f"failed {request.num_failures} times"
    return f"the target group {times} in steps of this request, of which the last ran nothing else; it is given up"

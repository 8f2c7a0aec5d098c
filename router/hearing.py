"""Which drafter a round listens to, and what the round says about it.

Under rejection the choice may depend on committed tokens, lengths, times and past outcomes, never on what was drawn
(docs/exactness.md). The length of a lookup's match is known from committed tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.proposal import Proposal, usable_suffix
from outrider.router.policy import after_plain_round, after_round
from outrider.router.requests import Request


@dataclass(frozen=True)
class Heard:
    """A proposal that continues a request's text.

    Attributes:
        draft_id: the draft worker that made it; None for lookup in the router.
    """

    proposal: Proposal
    draft_id: str | None

    @property
    def is_lookup(self) -> bool:
        return self.draft_id is None


def usable(request: Request) -> Proposal | None:
    """The part of the newest proposal of a draft worker that continues the request's text, or None."""
    if request.proposal is None or not request.throttle.is_on:
        return None
    return usable_suffix(request.proposal, request.text)


def settled(request: Request) -> Heard | None:
    """What is verified next whatever else may come: a longest match of lookup, else what a draft worker proposed."""
    found = _looked_up(request, any_length=False)
    if found is not None:
        return found
    proposal = usable(request)
    return Heard(proposal, request.proposal_draft) if proposal is not None else None


def heard(request: Request) -> Heard | None:
    """What would be verified now: a shorter match speaks where no draft worker has anything to say."""
    return settled(request) or _looked_up(request, any_length=True)


def acceptance(request: Request, is_lookup: bool) -> float:
    """The chance that a token of that drafter is accepted, given that all before it were."""
    return (request.lookup_throttle if is_lookup else request.throttle).acceptance


def learn(request: Request, proposal: Proposal | None, is_lookup: bool, num_accepted: int) -> None:
    """Count a round of a request for the drafter that it listened to, if any; for the other it was one without."""
    of_lookup, of_draft = request.lookup_throttle, request.throttle
    if proposal is not None and is_lookup:
        request.lookup_throttle = after_round(of_lookup, len(proposal.tokens), num_accepted)
        request.throttle = after_plain_round(of_draft)
        return
    request.lookup_throttle = after_plain_round(of_lookup)
    request.throttle = (
        after_plain_round(of_draft) if proposal is None else after_round(of_draft, len(proposal.tokens), num_accepted)
    )


def _looked_up(request: Request, *, any_length: bool) -> Heard | None:
    lookup, count = request.lookup, request.num_useful_proposals
    if lookup is None or count == 0 or not request.lookup_throttle.is_on:
        return None
    match = lookup.match(request.text)
    if match is None or not (any_length or match.length == lookup.longest):
        return None
    proposal = lookup.proposal(request.text, count)
    return Heard(proposal, None) if proposal is not None else None

"""What a scheduler counts for status and metrics: once a round of a request, never once a token."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.histogram import REQUEST_S, STEP_S, Histogram
from outrider.core.proposal import Proposal
from outrider.router.lookup import DRAFTER as LOOKUP
from outrider.router.requests import Request

MAX_DRAFTERS = 8  # kinds that are counted by their names
OTHER = "other"


@dataclass
class DrafterCounts:
    """Rounds with proposals of one kind of drafter. Nothing behind the end of a text is counted.

    Attributes:
        num_drafts: proposals that were verified.
        num_draft_tokens: tokens of them.
        num_accepted_tokens: those of them that became text.
        histogram: entry ``i`` counts proposals of which exactly ``i`` tokens became text.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        self.histogram.extend([0] * (num_accepted + 1 - len(self.histogram)))
        self.histogram[num_accepted] += 1


class SchedulerCounts:
    """Counts since the scheduler began.

    Attributes:
        drafters: by the name of their kind, such as "model".
        num_prompt_tokens: of requests whose prompt was computed; those of several choices once.
        num_generation_tokens: tokens that became text.
        num_resets: times that running requests started over on a target that was attached again.
        num_kept_proposals: proposals of draft workers that could continue a text when they came.
        num_dropped_proposals: the others.
        queue_time: from the arrival of a choice to its first step.
        round_time: of rounds with a proposal, from one commit of a choice to the next.
    """

    def __init__(self) -> None:
        self.drafters: dict[str, DrafterCounts] = {"model": DrafterCounts(), LOOKUP: DrafterCounts()}
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_resets = 0
        self.num_kept_proposals = 0
        self.num_dropped_proposals = 0
        self.queue_time = Histogram(REQUEST_S)
        self.round_time = Histogram(STEP_S)

    @property
    def lookup(self) -> DrafterCounts:
        """Those of n-gram lookup in the router."""
        return self.drafters[LOOKUP]

    def offered(self, *, kept: bool) -> None:
        """A proposal of a draft worker came."""
        if kept:
            self.num_kept_proposals += 1
        else:
            self.num_dropped_proposals += 1

    def began(self, request: Request, now: float) -> None:
        """A request takes part in a step."""
        if request.queued_at is not None:
            self.queue_time.observe(now - request.queued_at)
            request.queued_at = None

    def verified(self, proposal: Proposal, num_verified: int, num_accepted: int, *, is_lookup: bool) -> None:
        """A round decided about a proposal, of which ``num_verified`` tokens lie before the end of the text."""
        name = LOOKUP if is_lookup else proposal.drafter
        if name not in self.drafters:
            if len(self.drafters) >= MAX_DRAFTERS:
                name = OTHER
            self.drafters.setdefault(name, DrafterCounts())
        self.drafters[name].count(num_verified, num_accepted)

    def committed(self, request: Request, num_tokens: int, now: float, *, is_first: bool, had_proposal: bool) -> None:
        """A round of a request made tokens permanent."""
        self.num_generation_tokens += num_tokens
        if is_first and request.choice == 0:
            self.num_prompt_tokens += request.prompt_len
        if had_proposal and request.committed_at is not None:
            self.round_time.observe(now - request.committed_at)
        request.committed_at = now

"""One request's rows in a step."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.controls import needs_text
from outrider.core.plan import SequencePlan
from outrider.core.proposal import Proposal
from outrider.router.requests import Request


@dataclass(frozen=True)
class Rows:
    """One request's part in a step."""

    request: Request
    plan: SequencePlan
    proposal: Proposal | None = None  # what is verified
    draft_id: str | None = None  # of the draft worker that made it, if one did

    @property
    def num_text_rows(self) -> int:
        return self.plan.num_text_tokens

    @property
    def is_lookup(self) -> bool:
        return self.proposal is not None and self.draft_id is None


@dataclass
class RowsLeft:
    """Rows that a step still has room for, and how many of them may be scored."""

    rows: int
    scored: int

    def chunk(self, request: Request) -> int:
        """How many rows of its prompt a request gets.

        Scored rows are the first of their plan, so a prompt that begins anew has the rows that were scored before in
        chunks of their own. The last row of a prompt is not scored: what follows it is output.
        """
        missing, unscored = request.num_missing, request.num_unscored
        if unscored and request.kv_len < request.num_scored:
            return min(request.num_scored - request.kv_len, self.rows)
        if unscored > self.scored:
            return min(self.scored, self.rows)
        return min(missing, self.rows)


def sequence_plan(request: Request, num_text_rows: int, proposal: Proposal | None) -> SequencePlan:
    """The plan of a running request's next ``num_text_rows`` tokens, followed by a proposal at the end of its text."""
    start, tokens, sampling = request.kv_len, request.text.tokens, request.new.sampling
    proposed = proposal.tokens if proposal is not None else ()
    num_scored = min(num_text_rows, request.num_unscored) if start >= request.num_scored else 0
    first = 0 if num_scored else num_text_rows - 1
    is_last, is_first = num_text_rows == request.num_missing, not request.is_told
    return SequencePlan(
        seq_id=request.seq_id,
        generation=request.new.generation,
        kv_len=start,
        tokens=(*tokens[start : start + num_text_rows], *proposed),
        block_keep=request.blocks_told,
        block_append=tuple(request.blocks[request.blocks_told :]),
        num_proposal_tokens=len(proposed),
        draft_rows=proposal.rows if proposal is not None else (),
        logits_rows=tuple(range(first, num_text_rows + len(proposed))) if is_last or num_scored else (),
        sampling=sampling if is_first else None,
        scored_tokens=tuple(tokens[start + 1 : start + 1 + num_scored]),
        prefix_tokens=tuple(tokens[:start]) if is_first and needs_text(sampling) else (),
    )

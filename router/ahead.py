"""The next step, planned while one runs: only where what it leaves behind is known but for the tokens themselves.

That is so where every sequence enters a part of its prompt, or decodes without anybody who could propose something:
how far such a sequence gets in a step is known beforehand. The plan then says ``after_step`` (``core/ahead.py``), and
the group has it when the step before is done. A request whose text turns out to have ended has run one row for nothing.

A request that arrives after the plan was made has to wait for one step more. So the plan is made late, just early
enough to be there in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.core.plan import SequencePlan
from outrider.router.batch import MAX_SCORED_ROWS, Batcher, LimitPrompts
from outrider.router.flight import Step
from outrider.router.requests import Request
from outrider.router.step_rows import Rows, RowsLeft

LEAD_S = 0.01  # before the predicted end of the step that runs


@dataclass(frozen=True)
class _Outlook:
    """Where a running request will be when the step in flight is over.

    Attributes:
        start: its ``kv_len`` then; None where the step does not carry it.
        is_drawn: whether its only missing token is the one that this step draws.
    """

    request: Request
    start: int | None
    is_drawn: bool

    @property
    def num_missing(self) -> int:
        if self.is_drawn:
            return 1
        start = self.request.kv_len if self.start is None else self.start
        return len(self.request.text) - start


def rows_ahead(batcher: Batcher, step: Step, limit_prompts: LimitPrompts | None) -> list[Rows]:
    """The rows of the step after one that is in flight; empty if it cannot or need not be planned yet.

    Then nothing changes. Nobody is preempted: blocks that a step in flight uses stay with their requests.
    """
    if not all(_is_foreseeable(request) for request in (*batcher.running, *batcher.waiting)):
        return []
    if any(part.proposal is not None for part in step.rows.values()):
        return []
    outlooks = [_outlook(request, step) for request in batcher.running]
    going_on = [o for o in outlooks if not (o.is_drawn and len(o.request.text) + 1 >= o.request.end_len)]
    decoding = [o for o in going_on if o.num_missing == 1]
    if not batcher.hold_for(_positions(decoding)):
        return []
    rows = [_rows(outlook, 1) for outlook in decoding]
    left = RowsLeft(batcher.budget - len(decoding), MAX_SCORED_ROWS)
    if limit_prompts is not None and decoding and (len(going_on) > len(decoding) or batcher.waiting):
        entering = len(going_on) - len(decoding) + batcher.num_joining
        left.rows = min(left.rows, limit_prompts(len(decoding), entering, len(decoding)))
    for outlook in going_on:
        if outlook.num_missing > 1 and left.rows > 0:
            rows.append(_rows(outlook, min(outlook.num_missing, left.rows)))
            left.rows -= rows[-1].num_text_rows
    return [*rows, *batcher.admit(_nothing, left)]


def _is_foreseeable(request: Request) -> bool:
    """Whether nothing but the tokens themselves is unknown of a request's next round.

    A grammar may be late, and rows that are scored are counted when they come.
    """
    if request.runs_alone or request.num_unscored or request.new.sampling.grammar is not None:
        return False
    return request.num_useful_proposals == 0 or not _may_be_drafted_for(request)


def _may_be_drafted_for(request: Request) -> bool:
    if request.lookup is not None and request.lookup_throttle.is_on:
        return True
    return request.throttle.is_on and (request.session is not None or request.proposal is not None)


def _nothing(_: Request) -> None:
    """No proposal."""


def _outlook(request: Request, step: Step) -> _Outlook:
    part = step.rows.get(request.seq_id)
    if part is None or request.seq_id in step.dropped:
        return _Outlook(request, None, is_drawn=False)
    return _Outlook(request, request.kv_len + part.num_text_rows, is_drawn=bool(part.plan.logits_rows))


def _positions(outlooks: Iterable[_Outlook]) -> dict[Request, int]:
    """Positions that each request needs blocks for."""
    return {o.request: len(o.request.text) + (1 if o.is_drawn else 0) for o in outlooks}


def _rows(outlook: _Outlook, count: int) -> Rows:
    """The next ``count`` rows of a running request."""
    request, tokens = outlook.request, outlook.request.text.tokens
    start = request.kv_len if outlook.start is None else outlook.start
    plan = SequencePlan(
        seq_id=request.seq_id,
        generation=request.new.generation,
        kv_len=start if outlook.start is None else 0,
        tokens=() if outlook.is_drawn else tuple(tokens[start : start + count]),
        block_keep=request.blocks_told,
        block_append=tuple(request.blocks[request.blocks_told :]),
        logits_rows=(count - 1,) if count == outlook.num_missing else (),
    )
    request.blocks_told = len(request.blocks)
    return Rows(request, plan)

"""Tells the governor of speculation what runs and what rounds gave, and requests what it decides."""

from __future__ import annotations

from itertools import islice

from outrider.core.plan import StepResult
from outrider.router.books import Books
from outrider.router.drafts import DraftFacts
from outrider.router.flight import Step
from outrider.router.goodput import Level, Load, Round
from outrider.router.governor import Governor
from outrider.router.requests import Request
from outrider.router.step_rows import Rows


def weigh(books: Books) -> None:
    """Let the load decide how much is speculated in what is asked and planned from now on."""
    if not books.settings.adapt_to_load:
        return
    before, k = books.governor.level, books.settings.num_speculative_tokens
    level = books.governor.decide(present_load(books), k, books.pacer.step_facts)
    if level is not before:  # those that come have the present one (``Scheduler.add``)
        _apply(books, level)


def learn_goodput(books: Books, step: Step, result: StepResult, seconds: float) -> None:
    """A step is over, ``seconds`` after the one before it or after the first request came."""
    books.governor.took(_round(books, step, result, seconds))


def _round(books: Books, step: Step, result: StepResult, seconds: float) -> Round | None:
    """What a step tells, if anything: most streams must have decoded.

    Streams that name a number of their own take their rows at every level, so that they favour none; their tokens are
    left out.
    """
    decoding = {seq_id: part for seq_id, part in step.rows.items() if _decodes(part)}
    streams = [part.request for part in decoding.values()] + [r for r in books.batcher.running if r.sat_out]
    num_streams = sum(not _is_forced(request) for request in streams)
    if step.dropped or 2 * len(streams) <= step.load.num_streams or not num_streams:
        return None
    num_prompt_rows = sum(part.num_text_rows for seq_id, part in step.rows.items() if seq_id not in decoding)
    if num_prompt_rows:
        prompt_s = books.pacer.prompt_s(len(decoding), num_prompt_rows)
        if prompt_s is None:
            return None
        # A row that decodes costs as much as one of a prompt at least.
        least = len(decoding) / (len(decoding) + num_prompt_rows)
        seconds = max(seconds - prompt_s, least * seconds)
    counted = {seq_id: part for seq_id, part in decoding.items() if not _is_forced(part.request)}
    num_proposals = sum(part.proposal is not None for part in counted.values())
    num_tokens = sum(len(outcome.committed) for outcome in result.sequences if outcome.seq_id in counted)
    return Round(step.load, step.level, num_streams, num_proposals, num_tokens, seconds)


def _decodes(part: Rows) -> bool:
    return len(part.plan.verified_rows) == len(part.plan.tokens)


def _is_forced(request: Request) -> bool:
    """Whether it speculates as it likes."""
    return request.num_speculative_tokens > 0 and not request.is_governed


def draft_came(books: Books, draft: DraftFacts) -> None:
    """A draft joined, before it is given sessions. One that was there before proposes as it did."""
    if draft not in books.known_drafts:
        books.known_drafts.add(draft)
        books.governor.forget_speculation()
    weigh(books)


def forget_goodput(books: Books) -> None:
    """Steps or numbers of tokens are others from now on."""
    books.governor = Governor()
    _apply(books, books.governor.level)


def present_load(books: Books) -> Load:
    """What runs, and what may join the next step."""
    batcher = books.batcher
    joining = islice(batcher.waiting, batcher.num_joining) if batcher.waiting and batcher.can_admit() else ()
    streams = [*batcher.running, *joining]
    has_drafts = bool(books.drafts.drafts)
    return Load(len(streams), sum(r.is_governed and (has_drafts or r.lookup is not None) for r in streams))


def _apply(books: Books, level: Level) -> None:
    for request in books.requests:
        if request.is_governed and request.level is not level:
            request.level = level

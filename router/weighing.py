"""Tells the governor of speculation what runs and what rounds gave, and requests what it decides."""

from __future__ import annotations

from outrider.core.plan import StepResult
from outrider.router.books import Books
from outrider.router.flight import Step
from outrider.router.goodput import Level, Load, Round
from outrider.router.governor import Governor


def weigh(books: Books) -> None:
    """Let the load decide how much is speculated in what is asked and planned from now on."""
    if not books.settings.adapt_to_load:
        return
    k = books.settings.num_speculative_tokens
    _apply(books, books.governor.decide(present_load(books), k, books.pacer.step_facts))


def learn_goodput(books: Books, step: Step, result: StepResult, seconds: float) -> None:
    """A step is over, ``seconds`` after the one before it or after the first request came."""
    parts, load = step.rows.values(), step.load
    num_streams = len(parts) + sum(request.sat_out for request in books.batcher.running)
    is_decoding = all(len(part.plan.verified_rows) == len(part.plan.tokens) for part in parts)
    is_forced = any(part.request.num_speculative_tokens and not part.request.is_governed for part in parts)
    if not is_decoding or is_forced or step.dropped or num_streams != load.num_streams:
        books.governor.took(None)
        alone_s = books.pacer.alone_s(parts) if not is_forced and not is_decoding else None
        num_decoding = sum(part.num_text_rows == 1 for part in parts)
        if alone_s is not None and num_decoding:
            books.governor.delayed(load, step.level, num_decoding, seconds - alone_s)
        return
    num_proposals = sum(part.proposal is not None for part in parts)
    num_tokens = sum(len(outcome.committed) for outcome in result.sequences)
    books.governor.took(Round(load, step.level, num_proposals, num_tokens, seconds))


def forget_goodput(books: Books) -> None:
    """Steps, drafts or numbers of tokens are others from now on."""
    books.governor = Governor()
    _apply(books, books.governor.level)


def present_load(books: Books) -> Load:
    """What runs, and what may join the next step."""
    batcher = books.batcher
    joining = list(batcher.waiting)[: batcher.num_joining] if batcher.waiting and batcher.can_admit() else []
    streams = [*batcher.running, *joining]
    has_drafts = bool(books.drafts.drafts)
    return Load(len(streams), sum(r.is_governed and (has_drafts or r.lookup is not None) for r in streams))


def _apply(books: Books, level: Level) -> None:
    for request in books.requests:
        if request.is_governed and request.level is not level:
            request.level = level

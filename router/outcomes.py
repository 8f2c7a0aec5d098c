"""What a step's outcome means for each request, and how requests end."""

from __future__ import annotations

from dataclasses import replace

from outrider.core.plan import SequenceError, SequenceResult, StepResult
from outrider.router.books import Books
from outrider.router.hearing import learn, usable
from outrider.router.requests import Committed, FinishReason, Request, RoundFacts
from outrider.router.rounds import Cut, counted, cut, finished, num_verified
from outrider.router.step_rows import Rows
from outrider.router.suspects import progressed
from outrider.router.weighing import learn_goodput, weigh


def complete(books: Books, result: StepResult, now: float) -> list[Committed]:
    """Take in a step's outcome. An outcome of another epoch or step is dropped.

    Raises ``GroupError`` and changes nothing if the outcome contradicts the plan: the group must be rebuilt.
    """
    step = books.flight.land(result, books.info.vocab_size, now)
    if step is None:
        return []
    learn_goodput(books, step, result, now - books.pacer.ready_since)
    books.pacer.ready_since = now
    books.pacer.step_took(step.rows.values(), now - step.started, beside_drafts=step.beside_drafts)
    weigh(books)
    # Whoever could join the next step holds it back for a moment only.
    waits = books.pacer.will_wait(books.batcher.running) and not books.batcher.can_admit()
    committed = []
    for outcome in result.sequences:
        part = step.rows[outcome.seq_id]
        request = part.request
        if request.ended:
            if not books.flight.carries(request):
                books.batcher.release(request)
        elif outcome.error is SequenceError.UNDECIDED:
            continue  # it runs again from where it is
        elif outcome.error not in (None, SequenceError.NOT_READY):
            committed.append(end(books, request, FinishReason.ERROR, error_message=outcome.error_message))
        else:
            request.num_scored += len(outcome.prompt_logprobs)
            request.unreported.extend(outcome.prompt_logprobs)
            if outcome.committed:
                committed.append(_commit(books, part, outcome, now, waits))
            else:
                # A sequence that was not ready runs its last row again: to decide, not to compute.
                again = 1 if outcome.error is SequenceError.NOT_READY else 0
                books.batcher.computed(request, part.num_text_rows - again, 0)
    return committed


def _commit(books: Books, part: Rows, outcome: SequenceResult, now: float, waits: bool) -> Committed:
    """Make a round's tokens permanent, up to where the text ends."""
    request, proposal, tokens = part.request, part.proposal, outcome.committed
    if request.trace is not None:
        request.trace.decided()
    position = len(request.text)
    ending = cut(tokens, request.end_len - position, request.end_tokens, request.cutter)
    kept = tokens[: ending.num_kept]
    accepted = min(outcome.num_accepted, len(kept))
    request.stats = counted(request.stats, proposal, outcome, len(kept))
    learn(request, proposal, part.is_lookup, outcome.num_accepted)
    if proposal is not None:
        verified = num_verified(proposal, len(tokens), len(kept))
        books.counts.verified(proposal, verified, accepted, is_lookup=part.is_lookup)
        if part.draft_id is not None:
            books.drafts.count(part.draft_id, verified, accepted)
    is_first = position == request.prompt_len
    books.counts.committed(request, len(kept), now, is_first=is_first, had_proposal=proposal is not None)
    request.text.extend(kept)
    progressed(request)
    books.batcher.computed(request, part.num_text_rows, accepted)
    proposal_id = proposal.proposal_id if proposal is not None else 0
    commit = Committed(
        request.new.request_id,
        request.new.generation,
        position,
        kept,
        proposal_id=proposal_id,
        num_accepted=accepted,
        choice=request.choice,
        logprobs=outcome.logprobs[: len(kept)],
        prompt_logprobs=tuple(request.unreported),
    )
    request.unreported = []
    if request.trace is not None:
        drafted, drafter = (len(proposal.tokens), proposal.drafter) if proposal is not None else (0, "")
        goes_on = ending.reason is None
        facts = RoundFacts(books.epoch, position, drafted, accepted, len(kept), drafter, goes_on)
        request.trace.committed(facts)
    if ending.reason is not None:
        return replace(commit, finish=end(books, request, ending.reason, ending).finish)
    if usable(request) is None:
        request.proposal = None
    num_accepted = 0 if part.is_lookup else accepted
    books.drafts.commit(request, position, proposal_id, num_accepted, now, is_waited_for=waits)
    return commit


def end(
    books: Books, request: Request, reason: FinishReason, ending: Cut | None = None, error_message: str = ""
) -> Committed:
    """Take a request out of everything; blocks that a step in flight writes stay until that step is over."""
    books.requests.remove(request)
    books.batcher.remove(request)
    books.drafts.close(request)
    request.ended = True
    if request.trace is not None:
        request.trace.ended(reason, error_message)
    if not books.flight.carries(request):
        books.batcher.release(request)
    finish = finished(request, reason, books.info.row_invariant, ending, error_message)
    new = request.new
    return Committed(new.request_id, new.generation, len(request.text), (), finish, choice=request.choice)

"""What one round means for a request: what may be verified, and how much of the outcome becomes text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.logprobs import TokenLogprobs
from outrider.core.plan import SequencePlan, SequenceResult
from outrider.core.prefix import HashedTokens
from outrider.core.proposal import Proposal, proposal_fault, usable_suffix
from outrider.core.sampling import Sampling, Verifier
from outrider.router.requests import Cutter, Finished, FinishReason, Request, SpeculationStats


@dataclass(frozen=True)
class Cut:
    """How much of a round's tokens belongs to the text, and why the text ends there if it does."""

    num_kept: int
    reason: FinishReason | None = None
    matched_stop: str | None = None
    stop_token: int | None = None


def cut(tokens: Sequence[int], room: int, end_tokens: frozenset[int], cutter: Cutter) -> Cut:
    """Cut a round's tokens at an EOS or stop token, a stop string, or the end of the room, whatever comes first.

    ``room`` > 0 is the number of tokens that the text may still take. An EOS or stop token belongs to the text, and so
    does the token that completes a stop string.
    """
    tokens = tokens[:room]
    end = next((index for index, token in enumerate(tokens) if token in end_tokens), None)
    num_kept, matched = cutter.feed(tokens[:end])
    if matched is not None:
        return Cut(num_kept, FinishReason.STOP, matched_stop=matched)
    if end is not None:
        return Cut(end + 1, FinishReason.STOP, stop_token=tokens[end])
    return Cut(len(tokens), FinishReason.LENGTH if len(tokens) == room else None)


def refusal(proposal: Proposal, text: HashedTokens, vocab_size: int) -> str | None:
    """Why a proposal cannot be verified for a request with this text, or None."""
    fault = proposal_fault(proposal, vocab_size)
    if fault is not None:
        return fault
    if not proposal.tokens:
        return "no tokens"
    if not proposal.is_chain:
        return "a tree: only chains are verified"
    if usable_suffix(proposal, text) is not None:
        return None
    skip = len(text) - proposal.base_len
    if skip < 0 or text.hashes[proposal.base_len] != proposal.base_hash:
        return "a base that is not the committed text"
    if tuple(text.tokens[proposal.base_len :][: len(proposal.tokens)]) == proposal.tokens[:skip]:
        return "too late: all its tokens are decided"
    return "too late: other tokens were committed"


def prepared(proposal: Proposal, verifier: Verifier) -> Proposal:
    """The proposal without what its verifier does not look at: only rejection needs the draft's distributions."""
    return replace(proposal, rows=()) if proposal.rows and verifier is not Verifier.REJECTION else proposal


def result_fault(plan: SequencePlan, result: SequenceResult, sampling: Sampling, vocab_size: int) -> str | None:
    """How a result contradicts its plan, or None."""
    if result.error is not None:
        return None
    if not _are_of(result.prompt_logprobs, plan.scored_tokens):
        return "log-probabilities of other tokens than the prompt's"
    if not plan.verified_rows:
        return "tokens were committed where no logits were wanted" if result.committed else None
    num_accepted, committed = result.num_accepted, result.committed
    if not 0 <= num_accepted <= plan.num_proposal_tokens or len(committed) != num_accepted + 1:
        return f"{num_accepted} of {plan.num_proposal_tokens} tokens accepted, {len(committed)} committed"
    proposed = plan.tokens[len(plan.tokens) - plan.num_proposal_tokens :]
    if committed[:num_accepted] != proposed[:num_accepted]:
        return "accepted tokens are not the proposed ones"
    if any(not 0 <= token < vocab_size for token in committed):
        return f"a committed token outside the vocabulary of {vocab_size}"
    if not _are_of(result.logprobs, () if sampling.logprobs is None else committed):
        return "log-probabilities of other tokens than the committed ones"
    return None


def _are_of(entries: Sequence[TokenLogprobs], tokens: Sequence[int]) -> bool:
    """Whether there is one entry for each token."""
    return [entry.token_id for entry in entries] == list(tokens)


def num_verified(proposal: Proposal, num_committed: int, num_kept: int) -> int:
    """Proposed tokens that count as verified: all, or where the text ends inside the block those up to its end."""
    return len(proposal.tokens) if num_kept == num_committed else num_kept


def counted(
    stats: SpeculationStats, proposal: Proposal | None, result: SequenceResult, num_kept: int
) -> SpeculationStats:
    """The statistics after a round. Where the text ends inside the block, nothing behind its end is counted.

    A result tells no places of forced tokens: of those of a block that was cut, as many count as may lie before the
    cut, where every token was accepted.
    """
    stats = replace(
        stats,
        target_calls=stats.target_calls + (1 if num_kept else 0),
        grammar_ms=stats.grammar_ms + result.grammar_us / 1000.0,
    )
    if proposal is None:
        return stats
    accepted = min(result.num_accepted, num_kept)
    verified = num_verified(proposal, len(result.committed), num_kept)
    forced_accepted = min(result.num_forced_accepted, accepted)
    forced = result.num_forced_tokens if num_kept == len(result.committed) else forced_accepted
    histogram = list(stats.acceptance_histogram)
    histogram.extend([0] * (accepted + 1 - len(histogram)))
    histogram[accepted] += 1
    return replace(
        stats,
        drafter="+".join(sorted({*filter(None, stats.drafter.split("+")), proposal.drafter})),
        num_spec_steps=stats.num_spec_steps + 1,
        num_draft_tokens=stats.num_draft_tokens + verified,
        num_accepted_tokens=stats.num_accepted_tokens + accepted,
        acceptance_histogram=tuple(histogram),
        probability_bytes=stats.probability_bytes + sum(row.num_bytes for row in proposal.rows),
        num_forced_tokens=stats.num_forced_tokens + forced,
        num_forced_accepted=stats.num_forced_accepted + forced_accepted,
    )


def finished(
    request: Request, reason: FinishReason, row_invariant: bool, ending: Cut | None = None, error_message: str = ""
) -> Finished:
    """The end of a request; ``ending`` says what ended its text, where its text ended by itself.

    Text under rejection depends on what was proposed, and text of kernels that are not row-invariant on what ran beside
    it; neither is reproducible.
    """
    return Finished(
        reason=reason,
        prompt_tokens=request.prompt_len,
        completion_tokens=len(request.text) - request.prompt_len,
        speculation=request.stats,
        matched_stop=ending.matched_stop if ending is not None else None,
        stop_token=ending.stop_token if ending is not None else None,
        error_message=error_message,
        reproducible=row_invariant and request.new.sampling.verifier is not Verifier.REJECTION,
        cached_prompt_tokens=request.family.cached_prompt_tokens or 0,
    )

"""What is refused: requests that can never fit, and answers of a group that contradict what it was asked."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.core.errors import GroupError, InvalidRequest
from outrider.core.plan import GroupInfo, SequenceError, StepPlan, StepResult, committed_checksum
from outrider.core.sampling import Sampling
from outrider.router.requests import NewRequest
from outrider.router.rounds import result_fault


def end_length(request: NewRequest, info: GroupInfo) -> int:
    """Length at which the text of a request ends at the latest. Raises ``InvalidRequest`` if it can never fit.

    The last token needs no place in the cache.
    """
    length, capacity = len(request.prompt_tokens), info.num_blocks * info.block_size
    if length == 0:
        raise InvalidRequest("prompt_tokens", length, "at least one token long")
    if length >= info.max_model_len:
        raise InvalidRequest("prompt_tokens", length, f"shorter than the context of {info.max_model_len} tokens")
    if length > capacity:
        raise InvalidRequest("prompt_tokens", length, f"at most {capacity} tokens, which is what the cache holds")
    outside = next((token for token in request.prompt_tokens if not 0 <= token < info.vocab_size), None)
    if outside is not None:
        raise InvalidRequest("prompt_tokens", outside, f"in the vocabulary of {info.vocab_size} tokens")
    if request.num_speculative_tokens is not None and request.num_speculative_tokens < 0:
        raise InvalidRequest("num_speculative_tokens", request.num_speculative_tokens, "at least 0")
    end_len = min(info.max_model_len, capacity + 1)
    if request.max_tokens is not None:
        end_len = min(length + request.max_tokens, info.max_model_len)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest("max_tokens", request.max_tokens, "at least 1")
    if end_len > capacity + 1:
        limit = f"at most {capacity + 1 - length} with this prompt: the cache holds {capacity} tokens"
        raise InvalidRequest("max_tokens", request.max_tokens, limit)
    if request.min_tokens > end_len - length:
        limit = f"at most {end_len - length}: the text has no room for more behind this prompt"
        raise InvalidRequest("sampling.min_tokens", request.min_tokens, limit)
    return end_len


def check_result(plan: StepPlan, result: StepResult, samplings: Mapping[int, Sampling], vocab_size: int) -> None:
    """Raise ``GroupError`` if a result contradicts its plan, or ranks disagree about what they hold.

    ``samplings`` are the settings of each planned sequence.
    """
    planned = {sequence.seq_id: sequence for sequence in plan.sequences}
    if sorted(planned) != sorted(outcome.seq_id for outcome in result.sequences):
        raise GroupError(f"step {plan.step}: the group answered for other sequences than the planned ones")
    for outcome in result.sequences:
        sequence = planned[outcome.seq_id]
        fault = result_fault(sequence, outcome, samplings[outcome.seq_id], vocab_size)
        if outcome.generation != sequence.generation:
            fault = f"generation {outcome.generation} instead of {sequence.generation}"
        if fault is not None:
            raise GroupError(f"step {plan.step}, sequence {outcome.seq_id}: {fault}")
    if any(outcome.error is SequenceError.INVALID_PLAN for outcome in result.sequences):
        return  # a refused sequence has no part in the reports
    checksum = committed_checksum((sequence.seq_id, sequence.kv_len) for sequence in plan.sequences)
    for report in result.ranks:
        if report.committed_checksum != checksum:
            raise GroupError(f"step {plan.step}: rank {report.rank} holds other committed lengths than planned")

"""A request on its way from a frontend to the owner of a group. The owner trusts no frontend: it checks again."""

from __future__ import annotations

from outrider.controls import by_name
from outrider.core.errors import InvalidRequest
from outrider.core.sampling import Sampling
from outrider.core.wire import sampling_from_wire, sampling_to_wire
from outrider.router.limits import (
    SHOWN,
    check_ends,
    check_request_id,
    check_sampling,
    checked_logprobs_mode,
    checked_num_choices,
    checked_num_speculative_tokens,
    checked_stop,
    checked_stop_token_ids,
    checked_verifier,
)
from outrider.router.requests import NewRequest
from outrider.router.tokenizer import TextTokenizer
from outrider.v1 import common_pb2, group_pb2

TRACEPARENT_LENGTH = 55  # of version 00, which is the only one


def submit_to_wire(request: NewRequest, now: float) -> group_pb2.SubmitRequest:
    """EOS tokens do not travel, but for whether they count: the owner reads them from the same model folder."""
    message = group_pb2.SubmitRequest(
        request_id=request.request_id,
        prompt_tokens=request.prompt_tokens,
        sampling=sampling_to_wire(request.sampling),
        max_tokens=request.max_tokens or 0,
        stop_token_ids=sorted(request.stop_token_ids),
        stop=request.stop,
        num_speculative_tokens=request.num_speculative_tokens,
        ignore_eos=not request.eos_token_ids,
        min_tokens=request.min_tokens,
        num_choices=request.num_choices,
        traceparent=request.traceparent,
    )
    if request.deadline is not None:
        message.timeout_ms = max(1, round(1000 * (request.deadline - now)))
    return message


def submit_from_wire(message: group_pb2.SubmitRequest, tokenizer: TextTokenizer, now: float) -> NewRequest:
    """The inverse of ``submit_to_wire``; ``now`` is the time that the deadline counts from.

    Raises ``InvalidRequest`` for what would break a step or the router. The scheduler checks prompt and length; that a
    grammar compiles is left to the caller, for it takes time.
    """
    check_request_id(message.request_id)
    sampling = _sampling(message.sampling, tokenizer.vocab_size)
    max_tokens = message.max_tokens or None
    check_ends(sampling, ignore_eos=message.ignore_eos, min_tokens=message.min_tokens, max_tokens=max_tokens)
    return NewRequest(
        request_id=message.request_id,
        generation=0,
        prompt_tokens=tuple(message.prompt_tokens),
        sampling=sampling,
        max_tokens=max_tokens,
        eos_token_ids=frozenset() if message.ignore_eos else tokenizer.eos_token_ids,
        stop_token_ids=checked_stop_token_ids(message, tokenizer.vocab_size),
        stop=checked_stop(message),
        min_tokens=message.min_tokens,
        num_choices=checked_num_choices("num_choices", message.num_choices or 1, sampling),
        num_speculative_tokens=checked_num_speculative_tokens(message),
        deadline=now + message.timeout_ms / 1000 if message.timeout_ms else None,
        traceparent=message.traceparent[:TRACEPARENT_LENGTH],
    )


def _sampling(message: common_pb2.Sampling, vocab_size: int) -> Sampling:
    checked_verifier(message.verifier)
    checked_logprobs_mode(message.logprobs_mode)
    if message.choice:
        raise InvalidRequest("sampling.choice", message.choice, "0: num_choices says how many there are")
    if message.HasField("grammar") and message.grammar.WhichOneof("kind") is None:
        raise InvalidRequest("sampling.grammar", "empty", "one of json_schema, regex and ebnf, or absent")
    try:
        sampling = sampling_from_wire(message)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("sampling.controls", "what it is", f"JSON ({error})") from error
    check_sampling(sampling)
    for name, value in sampling.controls:
        if len(name) > SHOWN:
            raise InvalidRequest(
                "sampling.controls", f"{name[:SHOWN]}...", "an object whose names are those of controls"
            )
        control = by_name(name)
        fault = "is not known here" if control is None else control.fault(value, vocab_size)
        if fault is not None:
            shown = message.controls[name][:SHOWN]
            raise InvalidRequest(f"sampling.controls[{name!r}]", shown, f"a control in its resolved form ({fault})")
    return sampling

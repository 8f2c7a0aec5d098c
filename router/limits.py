"""What both doors of a router check alike: that of applications, and that of frontends in other processes.

Each function raises ``InvalidRequest`` with the field as the message spells it, the value, and what it must be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from outrider.core.errors import InvalidRequest
from outrider.core.logprobs import LogprobsMode
from outrider.core.sampling import MIN_TEMPERATURE, Sampling, Verifier
from outrider.v1 import generation_pb2, group_pb2

AnyRequest = generation_pb2.GenerateRequest | group_pb2.SubmitRequest

MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 128
MAX_SPECULATIVE_TOKENS = 64
MAX_REQUEST_ID_LENGTH = 128
MAX_CHOICES = 64
MAX_LOGPROBS = 20
SHOWN = 60  # characters of a bad value that an error repeats


def is_request_id(request_id: str) -> bool:
    """Whether it is empty, or short and printable."""
    return len(request_id) <= MAX_REQUEST_ID_LENGTH and request_id.isprintable()


def check_request_id(request_id: str) -> None:
    """Empty, or short and printable."""
    if not is_request_id(request_id):
        raise InvalidRequest(
            "request_id", request_id[:SHOWN], f"at most {MAX_REQUEST_ID_LENGTH} printable characters long"
        )


def call_name(what: str, request_id: str) -> str:
    """How a log names a call about a request. An id that is refused must not be in any line of it."""
    return f"{what} {request_id}" if is_request_id(request_id) else what


def check_sampling(sampling: Sampling) -> None:
    """What has a field of its own among the settings that target and drafts apply."""
    temperature, top_p = sampling.temperature, sampling.top_p
    if not math.isfinite(temperature) or (temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
        raise InvalidRequest(
            "sampling.temperature", temperature, f"0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        )
    if not 0 < top_p <= 1:  # also false for NaN
        raise InvalidRequest("sampling.top_p", top_p, "above 0 and at most 1")
    if (sampling.verifier is Verifier.GREEDY) != (temperature == 0):
        limit = "absent or greedy at temperature 0" if temperature == 0 else "rejection or coupled above temperature 0"
        raise InvalidRequest("sampling.verifier", sampling.verifier.label, limit)
    for field, number in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if number is not None and number > MAX_LOGPROBS:
            raise InvalidRequest(f"sampling.{field}", number, f"from 0 to {MAX_LOGPROBS}")


def checked_verifier(number: int) -> Verifier:
    """The verifier of this number."""
    try:
        return Verifier(number)
    except ValueError:
        raise InvalidRequest("sampling.verifier", number, "greedy (1), rejection (2) or coupled (3)") from None


def checked_logprobs_mode(number: int) -> LogprobsMode:
    """The mode of this number; 0 stands for raw."""
    try:
        return LogprobsMode(number or LogprobsMode.RAW)
    except ValueError:
        raise InvalidRequest("sampling.logprobs_mode", number, "raw (1) or processed (2)") from None


def checked_num_choices(field: str, number: int, sampling: Sampling) -> int:
    """How many choices to generate."""
    if not 1 <= number <= MAX_CHOICES:
        raise InvalidRequest(field, number, f"from 1 to {MAX_CHOICES}")
    if number > 1 and sampling.temperature == 0:
        raise InvalidRequest(field, number, "1 at temperature 0, where all choices would be the same")
    return number


def check_ends(
    sampling: Sampling,
    *,
    ignore_eos: bool,
    min_tokens: int,
    max_tokens: int | None,
    min_tokens_field: str = "sampling.min_tokens",
) -> None:
    """What decides where the text ends must not contradict itself."""
    if ignore_eos and sampling.grammar is not None:
        raise InvalidRequest("ignore_eos", True, "false with a grammar, whose texts end with an end-of-text token")
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(min_tokens_field, min_tokens, f"at most max_tokens, which is {max_tokens}")


def checked_stop(request: AnyRequest) -> tuple[str, ...]:
    """The stop strings."""
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(request.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for index, stop in enumerate(request.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop[{index}]", stop[:SHOWN], f"from 1 to {MAX_STOP_LENGTH} characters long")
    return tuple(dict.fromkeys(request.stop))


def checked_stop_token_ids(request: AnyRequest, vocab_size: int) -> frozenset[int]:
    """The tokens that end the text."""
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", f"{len(request.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids"
        )
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    return frozenset(request.stop_token_ids)


def checked_num_speculative_tokens(request: AnyRequest) -> int | None:
    """Most tokens that a round verifies; None where nothing is said."""
    if not request.HasField("num_speculative_tokens"):
        return None
    if request.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
        raise InvalidRequest(
            "num_speculative_tokens", request.num_speculative_tokens, f"at most {MAX_SPECULATIVE_TOKENS}"
        )
    return request.num_speculative_tokens


def check_token_ids(field: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Each in the vocabulary."""
    for index, token in enumerate(tokens):
        if token >= vocab_size:
            raise InvalidRequest(f"{field}[{index}]", token, f"below the vocabulary's size, {vocab_size}")

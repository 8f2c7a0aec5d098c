"""The door: a request as it came becomes one that can run, or is refused with the name of the field."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.core.errors import InvalidRequest
from outrider.core.sampling import MIN_TEMPERATURE, Sampling, Verifier
from outrider.router.requests import NewRequest
from outrider.router.tokenizer import TextTokenizer
from outrider.v1 import generation_pb2, group_pb2

AnyRequest = generation_pb2.GenerateRequest | group_pb2.SubmitRequest

MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 128
MAX_SPECULATIVE_TOKENS = 64
MAX_REQUEST_ID_LENGTH = 128
SHOWN = 60  # characters of a bad value that an error repeats


@dataclass(frozen=True)
class Defaults:
    """What a request takes where it says nothing.

    Attributes:
        verifier: for requests that sample and name none.
    """

    verifier: Verifier = Verifier.COUPLED


def admit(
    request: generation_pb2.GenerateRequest,
    *,
    request_id: str,
    tokenizer: TextTokenizer,
    max_model_len: int | None,
    defaults: Defaults,
    deadline: float | None,
) -> NewRequest:
    """Check every field and fill in every default. Raises ``InvalidRequest``.

    ``max_model_len`` is None where only the group's owner knows it. ``generation`` is left 0: the group sets it.
    """
    check_request_id(request.request_id)
    prompt = _prompt(request, tokenizer)
    if max_model_len is not None and len(prompt) >= max_model_len:
        raise InvalidRequest(
            request.WhichOneof("prompt") or "prompt",
            f"a prompt of {len(prompt)} tokens",
            f"at most {max_model_len - 1} tokens long: the context holds {max_model_len}",
        )
    return NewRequest(
        request_id=request_id,
        generation=0,
        prompt_tokens=tuple(prompt),
        sampling=_sampling(request.sampling, defaults),
        max_tokens=_max_tokens(request),
        eos_token_ids=tokenizer.eos_token_ids,
        stop_token_ids=checked_stop_token_ids(request, tokenizer.vocab_size),
        stop=checked_stop(request),
        num_speculative_tokens=checked_num_speculative_tokens(request),
        deadline=deadline,
    )


def check_request_id(request_id: str) -> None:
    """Raises ``InvalidRequest`` unless it is empty or short and printable."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH or not request_id.isprintable():
        raise InvalidRequest(
            "request_id", request_id[:SHOWN], f"at most {MAX_REQUEST_ID_LENGTH} printable characters long"
        )


def check_sampling(sampling: Sampling) -> None:
    """Raises ``InvalidRequest`` unless target and drafts can sample with these settings."""
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


def checked_verifier(number: int) -> Verifier:
    """The verifier of this number. Raises ``InvalidRequest`` if there is none."""
    try:
        return Verifier(number)
    except ValueError:
        raise InvalidRequest("sampling.verifier", number, "greedy (1), rejection (2) or coupled (3)") from None


def _prompt(request: generation_pb2.GenerateRequest, tokenizer: TextTokenizer) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        if not request.text:
            raise InvalidRequest("text", "", "at least one character long")
        tokens = tokenizer.encode(request.text)
    elif kind == "token_ids":
        tokens = list(request.token_ids.ids)
        _check_token_ids("token_ids.ids", tokens, tokenizer.vocab_size)
    elif kind == "chat":
        tokens = _chat(request.chat, tokenizer)
    else:
        raise InvalidRequest("prompt", None, "one of text, token_ids and chat")
    if not tokens:
        raise InvalidRequest("token_ids.ids" if kind == "token_ids" else kind, [], "at least one token long")
    return tokens


def _chat(chat: generation_pb2.ChatMessages, tokenizer: TextTokenizer) -> list[int]:
    if not chat.messages:
        raise InvalidRequest("chat.messages", [], "at least one message")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f"chat.messages[{index}].role", "", "a role, such as 'user'")
    return tokenizer.encode_chat([{"role": item.role, "content": item.content} for item in chat.messages])


def _sampling(params: generation_pb2.SamplingParams, defaults: Defaults) -> Sampling:
    temperature = params.temperature if params.HasField("temperature") else 1.0
    if params.verifier != 0:
        verifier = checked_verifier(params.verifier)
    else:
        verifier = Verifier.GREEDY if temperature == 0 else defaults.verifier
    sampling = Sampling(
        temperature=temperature,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        verifier=verifier,
    )
    check_sampling(sampling)
    return sampling


def _max_tokens(request: generation_pb2.GenerateRequest) -> int | None:
    if not request.HasField("max_tokens"):
        return None
    if request.max_tokens == 0:
        raise InvalidRequest("max_tokens", 0, "at least 1, or absent for as many as the context holds")
    return request.max_tokens


def checked_stop(request: AnyRequest) -> tuple[str, ...]:
    """The stop strings. Raises ``InvalidRequest``."""
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(request.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for index, stop in enumerate(request.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop[{index}]", stop[:SHOWN], f"from 1 to {MAX_STOP_LENGTH} characters long")
    return tuple(dict.fromkeys(request.stop))


def checked_stop_token_ids(request: AnyRequest, vocab_size: int) -> frozenset[int]:
    """The tokens that end the text. Raises ``InvalidRequest``."""
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", f"{len(request.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids"
        )
    _check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    return frozenset(request.stop_token_ids)


def checked_num_speculative_tokens(request: AnyRequest) -> int | None:
    """Most tokens that a round verifies; None where nothing is said. Raises ``InvalidRequest``."""
    if not request.HasField("num_speculative_tokens"):
        return None
    if request.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
        raise InvalidRequest(
            "num_speculative_tokens", request.num_speculative_tokens, f"at most {MAX_SPECULATIVE_TOKENS}"
        )
    return request.num_speculative_tokens


def _check_token_ids(field: str, tokens: Iterable[int], vocab_size: int) -> None:
    for index, token in enumerate(tokens):
        if token >= vocab_size:
            raise InvalidRequest(f"{field}[{index}]", token, f"below the vocabulary's size, {vocab_size}")

"""From Python values to a request. What a field cannot hold is refused here, by its name; the server does the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

from outrider.core.errors import InvalidRequest
from outrider.core.sampling import Verifier
from outrider.v1 import generation_pb2

Message = Mapping[str, str]
"""One message of a chat: ``{"role": "user", "content": "..."}``."""

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or a chat."""


class Options(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``. Absent or None: the server's default.

    Keys:
        max_tokens: output tokens wanted; default: as many as the context holds.
        temperature: 0 means greedy; default 1.0.
        top_k: sample from that many most likely tokens; default: all.
        top_p: sample from the most likely tokens of that mass together; default 1.0.
        seed: 64 bits; default: the server picks one and the completion tells it.
        verifier: "greedy", "rejection" or "coupled".
        stop: strings that end the text; it ends before them.
        stop_token_ids: tokens that end the text.
        num_speculative_tokens: proposed tokens for each round; 0 turns speculation off.
        request_id: yours; default: the server makes one.
        timeout: seconds that the whole request may take; default: the client's.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    verifier: str | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    num_speculative_tokens: int | None
    request_id: str | None
    timeout: float | None


def build_request(prompt: Prompt, **options: Unpack[Options]) -> generation_pb2.GenerateRequest:
    """The message of a request. Raises ``InvalidRequest``, and ``TypeError`` for options that do not exist."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request = generation_pb2.GenerateRequest(request_id=given.get("request_id", ""))
    _set_prompt(request, prompt)
    for name in ("max_tokens", "num_speculative_tokens"):
        if name in given:
            setattr(request, name, _unsigned(name, given[name], 32))
    sampling = request.sampling
    for name in ("temperature", "top_p"):
        if name in given:
            setattr(sampling, name, _number(f"sampling.{name}", given[name]))
    if "top_k" in given:
        sampling.top_k = _unsigned("sampling.top_k", given["top_k"], 32)
    if "seed" in given:
        sampling.seed = _unsigned("sampling.seed", given["seed"], 64)
    if "verifier" in given:
        sampling.verifier = cast(Any, verifier_number("sampling.verifier", given["verifier"]))
    stop = given.get("stop", ())
    for index, text in enumerate([stop] if isinstance(stop, str) else stop):
        request.stop.append(_text(f"stop[{index}]", text))
    for index, token in enumerate(given.get("stop_token_ids", ())):
        request.stop_token_ids.append(_unsigned(f"stop_token_ids[{index}]", token, 32))
    return request


def verifier_number(field: str, name: str) -> int:
    """Raises ``InvalidRequest`` unless it is the name of a verifier."""
    try:
        return int(Verifier[name.upper()])
    except (KeyError, AttributeError):
        raise InvalidRequest(field, name, "'greedy', 'rejection' or 'coupled'") from None


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = _text("text", prompt)
    elif isinstance(prompt, bytes | bytearray):  # a sequence of integers, but hardly meant as token ids
        raise InvalidRequest("text", bytes(prompt[:60]), "a string, not bytes")
    elif len(prompt) and all(isinstance(item, Mapping) for item in prompt):
        for index, message in enumerate(cast(Sequence[Message], prompt)):
            if set(message) != {"role", "content"}:
                raise InvalidRequest(f"chat.messages[{index}]", dict(message), "of the keys 'role' and 'content'")
            request.chat.messages.add(
                role=_text(f"chat.messages[{index}].role", message["role"]),
                content=_text(f"chat.messages[{index}].content", message["content"]),
            )
    else:
        ids = [_unsigned(f"token_ids.ids[{index}]", token, 32) for index, token in enumerate(prompt)]
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(ids)


def _unsigned(field: str, value: Any, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise InvalidRequest(field, value, f"a whole number from 0 to 2**{bits} - 1")
    return value


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(field, value, "a number that 64 bits hold") from None


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(field, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, value[:60], "valid Unicode, without lone surrogates") from None
    return value

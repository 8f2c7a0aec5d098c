"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from outrider.core import errors
from outrider.core.errors import InvalidRequest, OutriderError, for_log
from outrider.router.http.fields import UNSUPPORTED

# What the frontend and the owner of a group call a prompt, and what they say of one that does not fit.
PROMPT_FIELDS = ("prompt", "text", "token_ids", "token_ids.ids", "chat", "prompt_tokens")
_TOO_LONG = ("the context holds", "shorter than the context", "what the cache holds")
# Clients retry 429 and 5xx by themselves; x-should-retry tells OpenAI's where that cannot help.
_NO_RETRY = {"x-should-retry": "false"}


@dataclass(eq=False)  # frozen exceptions cannot be raised through context managers
class HttpError(Exception):
    """An answer that is an error.

    Attributes:
        for_log: what the log tells of it; the message may repeat what the client sent.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    for_log: str = ""

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


_ANSWERS: dict[type[OutriderError], tuple[int, str, str, Mapping[str, str]]] = {
    errors.Overloaded: (429, "rate_limit_error", "queue_full", {"retry-after": "1"}),
    errors.Unavailable: (503, "service_unavailable_error", "unavailable", {"retry-after": "1"}),
    errors.DeadlineExceeded: (504, "timeout_error", "deadline_exceeded", _NO_RETRY),
    errors.Conflict: (409, "invalid_request_error", "request_id_in_use", _NO_RETRY),
    errors.NotFound: (404, "invalid_request_error", "not_found", {}),
    errors.GenerationFailed: (500, "server_error", "generation_failed", _NO_RETRY),
}


def http_error(error: OutriderError, names: Mapping[str, str]) -> HttpError:
    """The answer that stands for an exception; ``names`` says how the client spells a field (``spelt``)."""
    if isinstance(error, InvalidRequest):
        param = spelt(error.field, names)
        line = str(InvalidRequest(param, error.value, error.limit))
        too_long = error.field in PROMPT_FIELDS and any(words in error.limit for words in _TOO_LONG)
        code = "context_length_exceeded" if too_long else "invalid_value"
        told = for_log(InvalidRequest(param, error.value, error.limit))
        return HttpError(400, " ".join(line.split()), param=param, code=code, for_log=told)
    for kind, (status, name, code, headers) in _ANSWERS.items():
        if isinstance(error, kind):
            return HttpError(status, str(error), name, code=code, headers=headers, for_log=for_log(error))
    return HttpError(500, str(error), "server_error", code="internal_error", for_log=for_log(error))


def fault_in_the_server(error: Exception) -> HttpError:
    """For what is no error of ours. Nothing of it is shown."""
    line = f"a fault in the server ({type(error).__name__}); its log has more"
    return HttpError(500, line, "server_error", code="internal_error", headers=_NO_RETRY)


def spelt(name: str, names: Mapping[str, str]) -> str:
    """A field of the frontend's request as the client wrote it. ``names``: fields or beginnings of them."""
    for known in sorted(names, key=len, reverse=True):
        if name == known or name.startswith((known + ".", known + "[")):
            return names[known] + name[len(known) :]
    return name.removeprefix("sampling.")


def shape_error(error: ValidationError, body: bytes) -> HttpError:
    """A body that is no request: the first field that is wrong, as a path such as ``messages[0].role``."""
    found = error.errors(include_url=False)
    bad_json = next((item["msg"] for item in found if item["type"] == "json_invalid"), None)
    if bad_json is not None:
        return HttpError(400, f"the body is not JSON: {bad_json.removeprefix('Invalid JSON: ')}", code="invalid_json")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # numbers of thousands of digits, say: the location is told without the body
        value = None
    # Of a field of several types each is reported; the one that got furthest is meant.
    same_field = [item for item in found if item["loc"][:1] == found[0]["loc"][:1]]
    first = max(same_field, key=lambda item: len(_parts(item["loc"], value)))
    path = _path(_parts(first["loc"], value))
    if first["type"] == "extra_forbidden":
        message = f"{path} is no field that is known here"
        return HttpError(400, message, param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return HttpError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    if first["type"].startswith("union_tag") and isinstance(first["input"], dict):  # of parts of a message
        path, first = f"{path}.type", {**first, "input": first["input"].get("type")}
    shown = _shown(first["input"])
    reason = UNSUPPORTED.get(str(first["loc"][0]) if first["loc"] else "")
    if reason is not None:
        message = f"{path} is {shown}, which is not supported here: {reason}"
        return HttpError(400, message, param=path, code="unsupported_parameter")
    return HttpError(400, f"{path or 'the body'} is {shown}: {first['msg']}", param=path or None, code="invalid_type")


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer of thousands of digits
        shown = "a number too long to show"
    return shown if len(shown) <= errors.MAX_SHOWN else shown[: errors.MAX_SHOWN] + "..."


def _path(parts: Sequence[int | str]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _parts(location: tuple[int | str, ...], value: Any) -> list[int | str]:
    """The parts of a location that are in the body: between them are names of types, where a field has several."""
    parts: list[int | str] = []
    for index, part in enumerate(location):
        if _holds(value, part):
            value = value[part]
        elif not (index == len(location) - 1 and isinstance(value, dict)) or _is_type(part):
            continue
        parts.append(part)
    return parts


def _holds(value: Any, part: int | str) -> bool:
    if isinstance(part, int):
        return isinstance(value, list) and part < len(value)
    return isinstance(value, dict) and part in value


def _is_type(part: int | str) -> bool:
    return isinstance(part, int) or part in {"str", "int", "float", "bool"} or part[:1].isupper() or "[" in part

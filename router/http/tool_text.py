"""Calls in a model's own words: JSON objects, read without trusting them, whose arguments stay as they were written."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

BLANKS = " \t\r\n"
_BETWEEN_TEXTS = re.compile(r'[{}"]')
_IN_TEXT = re.compile(r'["\\]')
_ARGUMENTS = ("arguments", "parameters")  # the first that is there; Llama's models write the second


@dataclass(frozen=True)
class Call:
    """``arguments``: JSON, as the model wrote it."""

    name: str
    arguments: str


def read_call(text: str, start: int) -> tuple[Call, int] | None:
    """The call whose object begins at ``start``, and where it ends; None for anything that is not one, or not yet."""
    try:
        members, end = _members(text, start)
    except (ValueError, RecursionError, IndexError):
        return None
    name = members.get("name", (None, ""))[0]
    if not isinstance(name, str):
        return None
    value, written = next((members[key] for key in _ARGUMENTS if key in members), (None, ""))
    if value is None:
        return Call(name, "{}"), end
    if isinstance(value, str):  # some models write the arguments as a text that holds JSON
        written = value.encode("utf-8", "replace").decode()  # an escape may stand for half a character
    return Call(name, written), end


class ObjectEnd:
    """Finds where an object ends that comes in parts. Each character is looked at once; it need not be sound JSON."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._is_escaped = False

    def find(self, part: str, at: int = 0) -> int | None:
        """Go on with ``part`` from ``at``, at first with the object's brace. Returns where what is behind it begins."""
        if self._is_escaped and at < len(part):
            self._is_escaped, at = False, at + 1
        while True:
            found = (_IN_TEXT if self._in_text else _BETWEEN_TEXTS).search(part, at)
            if found is None:
                return None
            mark, at = found[0], found.end()
            if mark == '"':
                self._in_text = not self._in_text
            elif mark == "\\":
                self._is_escaped = at == len(part)
                at += 1
            else:
                self._depth += 1 if mark == "{" else -1
                if self._depth <= 0:
                    return at


def skip_blanks(text: str, at: int, blanks: str = BLANKS) -> int:
    while at < len(text) and text[at] in blanks:
        at += 1
    return at


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Each member of an object, as a value and as it is written, and where the object ends."""
    members: dict[str, tuple[Any, str]] = {}
    at = skip_blanks(text, _after(text, at, "{"))
    if text[at] == "}":
        return members, at + 1
    while True:
        key, at = _DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key is a text")
        at = skip_blanks(text, _after(text, skip_blanks(text, at), ":"))
        value, end = _DECODER.raw_decode(text, at)
        members[key] = value, text[at:end]
        at = skip_blanks(text, end)
        if text[at] == "}":
            return members, at + 1
        at = skip_blanks(text, _after(text, at, ","))


def _after(text: str, at: int, mark: str) -> int:
    if text[at] != mark:
        raise ValueError(f"{mark} is missing")
    return at + 1


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _number(_: str) -> int:
    return 0  # only what is written is told on, so that no number can be too large


_DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_number, parse_int=_number)

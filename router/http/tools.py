"""Tools: which calls are forced, by which grammar, and what of a model's text is a call."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.core.errors import InvalidRequest
from outrider.router.http.fields import ChatRequest, ChosenTool, Function
from outrider.router.http.tool_text import Call, ObjectEnd, read_call, skip_blanks

Json = dict[str, Any]

_BETWEEN_CALLS = " \t\r\n;"
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples", "example", "required", "x-guidance"})


@dataclass(frozen=True)
class TextPiece:
    """Text of the answer that is no call."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """A part of a call. The first one of each ``index`` carries ``id`` and ``name``."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = TextPiece | CallPiece


class ToolParser(Protocol):
    """Takes the text of one choice as it comes."""

    def feed(self, text: str) -> Iterator[Piece]: ...

    def finish(self) -> Iterator[Piece]:
        """What was held back: the text is over."""
        ...


def wanted_functions(request: ChatRequest) -> dict[str, Function]:
    """The functions that the model may call in this answer, by name. Raises ``InvalidRequest``."""
    tools = request.tools or []
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        if tool.function.name in functions:
            raise InvalidRequest(f"tools[{index}].function.name", tool.function.name, "a name that no other tool has")
        functions[tool.function.name] = tool.function
    choice = request.tool_choice
    if choice in (None, "none"):
        return functions if choice is None else {}
    if not functions:
        raise InvalidRequest("tool_choice", _shown(choice), "absent or 'none' without tools")
    if isinstance(choice, ChosenTool):
        if choice.function.name not in functions:
            raise InvalidRequest("tool_choice.function.name", choice.function.name, f"one of {sorted(functions)}")
        return {choice.function.name: functions[choice.function.name]}
    return functions


def forced_schema(request: ChatRequest, functions: dict[str, Function]) -> Json | None:
    """The JSON schema of an answer that must be calls; None where the model is free. Raises ``InvalidRequest``.

    A named function: its arguments. ``required``: a list of ``{"name", "arguments"}``, of one where calls in parallel
    are not wanted.
    """
    if isinstance(request.tool_choice, ChosenTool):
        (function,) = functions.values()
        return _parameters(function)
    if request.tool_choice != "required":
        return None
    shared: Json = {}
    calls = []
    for name, function in functions.items():
        arguments = rebased(_parameters(function), f"#/$defs/{name}")
        if arguments != _parameters(function):  # it refers to parts of itself: those stand where references lead
            shared[name], arguments = arguments, {"$ref": f"#/$defs/{name}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    item = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: Json = {"type": "array", "items": item, "minItems": 1}
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return {**schema, "$defs": shared} if shared else schema


def tool_parser(request: ChatRequest, functions: dict[str, Function], style: str) -> ToolParser | None:
    """What reads the calls of one choice; None where the answer is text. ``style``: ``router.tool_call_parser``."""
    if not functions:
        return None
    if isinstance(request.tool_choice, ChosenTool):
        return NamedCall(request.tool_choice.function.name)
    if request.tool_choice == "required":
        return CallList()
    if style == "llama3_json":
        return BareJsonCalls(functions)
    return HermesCalls(functions)


class NamedCall:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> Iterator[Piece]:
        if text:
            yield self._piece(text)

    def finish(self) -> Iterator[Piece]:
        if self._name is not None:
            yield self._piece("")

    def _piece(self, text: str) -> CallPiece:
        name, self._name = self._name, None
        return CallPiece(0, text, id=call_id() if name is not None else None, name=name)


@dataclass
class CallList:
    """The whole text is a JSON list of calls. Each call is told when it is complete; one that is cut off is not."""

    _parts: list[str] = field(default_factory=list)  # of the call that is not complete
    _end: ObjectEnd | None = None
    _count: int = 0

    def feed(self, text: str) -> Iterator[Piece]:
        at = 0
        while True:
            if self._end is None:
                at = text.find("{", at)
                if at < 0:
                    return
                self._end = ObjectEnd()
            end = self._end.find(text, at)
            self._parts.append(text[at:end])
            if end is None:
                return
            whole, at = "".join(self._parts), end
            self._parts, self._end = [], None
            found = read_call(whole, 0)
            if found is not None:
                yield _whole_call(self._count, found[0])
                self._count += 1

    def finish(self) -> Iterator[Piece]:
        return iter(())


@dataclass
class HermesCalls:
    """Calls stand as JSON between ``<tool_call>`` and ``</tool_call>``, the rest is text (Hermes, Qwen).

    What is between the two and is no call of a known function stays text.
    """

    functions: dict[str, Function]
    _held: str = ""  # what may be the beginning of the next mark, and nothing longer
    _block: list[str] = field(default_factory=list)  # parts of a call whose end is still to come, with its mark
    _count: int = 0
    _begin: str = field(default="<tool_call>", init=False)
    _end: str = field(default="</tool_call>", init=False)

    def feed(self, text: str) -> Iterator[Piece]:
        text, self._held = self._held + text, ""
        at = 0
        while True:
            mark = self._end if self._block else self._begin
            found = text.find(mark, at)
            if found < 0:
                free = len(text) - _overlap(text[at:], mark)
                yield from self._passed(text[at:free])
                self._held = text[free:]
                return
            if not self._block:
                yield from self._passed(text[at:found])
                self._block.append(mark)
            else:
                inside = "".join([*self._block[1:], text[at:found]])
                self._block.clear()
                yield self._call_or_text(f"{self._begin}{inside}{mark}", inside)
            at = found + len(mark)

    def _passed(self, text: str) -> Iterator[Piece]:
        """Text without a mark."""
        if text and self._block:
            self._block.append(text)
        elif text:
            yield TextPiece(text)

    def finish(self) -> Iterator[Piece]:
        held = "".join([*self._block, self._held])
        self._block, self._held = [], ""
        if held.startswith(self._begin):  # models leave the end out where the end of the text stands for it
            yield self._call_or_text(held, held[len(self._begin) :])
        elif held:
            yield TextPiece(held)

    def _call_or_text(self, block: str, inside: str) -> Piece:
        calls = _calls_in(inside, self.functions)
        if calls is None or len(calls) != 1:
            return TextPiece(block)
        self._count += 1
        return _whole_call(self._count - 1, calls[0])


@dataclass
class BareJsonCalls:
    """The text as a whole is calls as JSON, separated by ``;``, or else text (Llama 3)."""

    functions: dict[str, Function]
    _held: list[str] = field(default_factory=list)
    _is_text: bool | None = None  # None while only blanks came

    def feed(self, text: str) -> Iterator[Piece]:
        if self._is_text is None and (begun := text.lstrip()):
            self._is_text = not begun.startswith("{")
        self._held.append(text)
        if self._is_text:
            yield from self._told()

    def _told(self) -> Iterator[Piece]:
        held = "".join(self._held)
        self._held.clear()
        if held:
            yield TextPiece(held)

    def finish(self) -> Iterator[Piece]:
        calls = _calls_in("".join(self._held), self.functions)
        if calls is None:
            yield from self._told()
            return
        for index, call in enumerate(calls):
            yield _whole_call(index, call)


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _whole_call(index: int, call: Call) -> CallPiece:
    return CallPiece(index, call.arguments, id=call_id(), name=call.name)


def _calls_in(text: str, functions: dict[str, Function]) -> list[Call] | None:
    """The calls that a text consists of; None where it is something else."""
    calls: list[Call] = []
    at = skip_blanks(text, 0)
    while at < len(text):
        found = read_call(text, at)
        if found is None or found[0].name not in functions:
            return None
        calls.append(found[0])
        at = skip_blanks(text, found[1], _BETWEEN_CALLS)
    return calls or None


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of ``mark``."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _parameters(function: Function) -> Json:
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return function.parameters


def rebased(schema: Any, root: str) -> Any:
    """A schema as a part of a larger one, where ``root`` leads to it: references to itself begin there.

    What is data within a schema (``const``, ``enum``, ...) stays, and so does a part that has an address of its own.
    """
    if isinstance(schema, list):
        return [rebased(item, root) for item in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    parts: Json = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            parts[key] = root + value[1:]
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            parts[key] = {name: rebased(part, root) for name, part in value.items()}
        else:
            parts[key] = value if key in _DATA else rebased(value, root)
    return parts


def _shown(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, ChosenTool) else choice


def template_tools(request: ChatRequest, functions: dict[str, Function]) -> Sequence[Json] | None:
    """The tools as chat templates take them; None where the model is not to know of any."""
    if not functions:
        return None
    named = [tool for tool in request.tools or [] if tool.function.name in functions]
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in named]

"""Calls of tools: what is forced, and what of a text is a call, however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.core.errors import InvalidRequest
from outrider.router.http.fields import ChatRequest, Function
from outrider.router.http.tools import (
    BareJsonCalls,
    CallList,
    CallPiece,
    HermesCalls,
    NamedCall,
    TextPiece,
    ToolParser,
    forced_schema,
    wanted_functions,
)

FUNCTIONS = {name: Function(name=name) for name in ("add", "look_up")}
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
OTHER = '{"name": "look_up", "arguments": {"text": "}</tool_cal \\" {"}}'


def cuts(text: str) -> list[list[str]]:
    """One text in pieces of one size after another."""
    sizes = (1, 2, 3, 7, len(text))
    return [[text[at : at + size] for at in range(0, len(text), size)] for size in sizes] if text else [[]]


def read(parser: ToolParser, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The text, and the calls as (name, arguments)."""
    pieces = [piece for part in parts for piece in parser.feed(part)] + list(parser.finish())
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    calls: dict[int, list[Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            assert (piece.name is not None) == (piece.id is not None) == (piece.index not in calls)
            call = calls.setdefault(piece.index, [piece.name, ""])
            call[1] += piece.arguments
    assert list(calls) == list(range(len(calls)))
    return text, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize(
    ("text", "free", "names"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", ["add"]),
        (f"Well <tool_call>{CALL}</tool_call><tool_call>{OTHER}</tool_call> there", "Well  there", ["add", "look_up"]),
        (f"<tool_call>\n{CALL}", "", ["add"]),
        ("a < b <tool <tool_call", "a < b <tool <tool_call", []),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
        ("", "", []),
    ],
)
def test_hermes(text: str, free: str, names: list[str]) -> None:
    for parts in cuts(text):
        found, calls = read(HermesCalls(FUNCTIONS), parts)
        assert found == free
        assert [name for name, _ in calls] == names
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(
    ("text", "free", "names"),
    [
        (CALL, "", ["add"]),
        (CALL.replace("arguments", "parameters") + "; " + OTHER, "", ["add", "look_up"]),
        ("I would {" + CALL, "I would {" + CALL, []),
        ('{"a": 1}', '{"a": 1}', []),
        (CALL[:-3], CALL[:-3], []),
    ],
)
def test_bare_json(text: str, free: str, names: list[str]) -> None:
    for parts in cuts(text):
        found, calls = read(BareJsonCalls(FUNCTIONS), parts)
        assert (found, [name for name, _ in calls]) == (free, names)


def test_a_list_of_calls_that_is_cut_off_keeps_those_that_are_whole() -> None:
    for parts in cuts(f"[{CALL},{OTHER}]"):
        assert [name for name, _ in read(CallList(), parts)[1]] == ["add", "look_up"]
    for parts in cuts(f"[{CALL},{OTHER[:-4]}"):
        assert [name for name, _ in read(CallList(), parts)[1]] == ["add"]


def test_a_named_call_is_its_arguments() -> None:
    for parts in cuts('{"a": 1}'):
        assert read(NamedCall("add"), parts) == ("", [("add", '{"a": 1}')])
    assert read(NamedCall("add"), []) == ("", [("add", "")])


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}))


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


def schema_of(**fields: Any) -> Any:
    request = chat(**fields)
    return forced_schema(request, wanted_functions(request))


def test_only_required_and_named_calls_are_forced() -> None:
    tools = [tool("f", type="object"), tool("g")]
    for choice in (None, "auto", "none"):
        assert schema_of(tools=tools, tool_choice=choice) is None
    assert schema_of(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}}) == {"type": "object"}
    required = schema_of(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert (required["minItems"], required["maxItems"]) == (1, 1)
    assert [item["properties"]["name"]["const"] for item in required["items"]["anyOf"]] == ["f", "g"]
    assert "maxItems" not in schema_of(tools=tools, tool_choice="required")


def test_references_to_definitions_hold_within_the_list_of_calls() -> None:
    parameters = {"$ref": "#/$defs/thing", "$defs": {"thing": {"type": "object"}}}
    schema = schema_of(tools=[tool("f", **parameters), tool("g", **parameters)], tool_choice="required")
    assert schema["$defs"] == {"thing": {"type": "object"}}
    assert schema["items"]["anyOf"][0]["properties"]["arguments"] == {"$ref": "#/$defs/thing"}
    other = {**parameters, "$defs": {"thing": {"type": "string"}}}
    with pytest.raises(InvalidRequest, match=r"tools\[1\].function.parameters"):
        schema_of(tools=[tool("f", **parameters), tool("g", **other)], tool_choice="required")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
    ],
)
def test_choices_that_cannot_be_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wanted_functions(chat(**fields))
    assert caught.value.field == field

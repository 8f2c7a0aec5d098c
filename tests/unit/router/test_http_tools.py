"""Calls of tools: what is forced, and what of a text is a call, however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.core.errors import InvalidRequest
from outrider.router.http.fields import ChatRequest, Function
from outrider.router.http.tool_text import ObjectEnd, read_call
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


BUSY = json.dumps({"name": "add", "arguments": {"parts": [{"a": '{\\"}'}] * 200, "tail": "</tool_cal" * 200}})


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (CallList(), f"[{BUSY}, {BUSY}]"),
        (HermesCalls(FUNCTIONS), f"<tool_call>{BUSY}</tool_call> and <tool_call>{BUSY}</tool_call>"),
        (BareJsonCalls(FUNCTIONS), f"{BUSY}; {BUSY}"),
    ],
)
def test_a_call_is_read_once_however_it_comes(parser: ToolParser, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all that came again with each token would take seconds of the event loop."""
    read_at: list[int] = []

    def noted(given: str, start: int) -> Any:
        read_at.append(len(given) - start)
        return read_call(given, start)

    monkeypatch.setattr("outrider.router.http.tools.read_call", noted)
    _, calls = read(parser, list(text))
    assert [json.loads(arguments) for _, arguments in calls] == [json.loads(BUSY)["arguments"]] * 2
    assert len(read_at) == 2


def test_hermes_looks_for_the_end_in_what_is_new() -> None:
    parser = HermesCalls(FUNCTIONS)
    assert list(parser.feed("<tool_call>")) == []
    for part in [BUSY[at : at + 5] for at in range(0, len(BUSY), 5)]:
        assert list(parser.feed(part)) == []
        assert len(parser._held) < len("</tool_call>")  # all that is looked at again
    assert [type(piece) for piece in parser.feed("</tool_call>")] == [CallPiece]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("{}", 2),
        ('{"a": {"}": "\\"}"}} {}', 19),
        ('{"\\\\"}{', 6),
        ('{"\\\\\\"}', None),
        ("{", None),
    ],
)
def test_where_an_object_ends(text: str, end: int | None) -> None:
    for parts in cuts(text):
        looking, behind = ObjectEnd(), 0
        for part in parts:
            found = looking.find(part)
            if found is not None:
                assert behind + found == end
                break
            behind += len(part)
        else:
            assert end is None


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


HOSTILE = [
    '{"name": []}',
    '{"name": {"a": 1}, "arguments": {}}',
    '{"name": 5, "arguments": {}}',
    '{"arguments": {}}',
    '{"name": "add", "arguments": NaN}',
    '{"name": "add", "arguments": ' + "[" * 100_000,
    '{"name": "add", "arguments": {"a": ' + "[" * 100_000,
    '{"name" "add"}',
    '{"name": "add",}',
    '{"name": "add"',
    '{1: "add"}',
    '["add"]',
    '"add"',
    "{",
]


@pytest.mark.parametrize("words", HOSTILE)
def test_what_is_no_call_stays_text(words: str) -> None:
    text = f"<tool_call>{words}</tool_call>"
    assert read(HermesCalls(FUNCTIONS), [text]) == (text, [])
    assert read(BareJsonCalls(FUNCTIONS), [words]) == (words, [])
    read(CallList(), ["[" + words + "]"])  # a grammar forces better, and nothing but an end must come of this


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"a": 1e999, "b": 12345678901234567890123}', '{"a": 1e999, "b": 12345678901234567890123}'),
        ('{ "a" : [ 1 ] }', '{ "a" : [ 1 ] }'),
        ("null", "{}"),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('"\\ud800"', "?"),
    ],
)
def test_arguments_are_told_as_they_were_written(written: str, told: str) -> None:
    call = f'{{"name": "add", "arguments": {written}}}'
    assert read(HermesCalls(FUNCTIONS), [f"<tool_call>{call}</tool_call>"]) == ("", [("add", told)])
    assert read(CallList(), [f"[{call}]"]) == ("", [("add", told)])


def test_references_of_a_tools_schema_lead_where_it_stands() -> None:
    node = {
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "kind": {"$ref": "#/$defs/Kind"},
            "$ref": {"const": {"$ref": "#"}},
        },
        "$defs": {"Kind": {"enum": ["$ref", "#"]}},
    }
    other = {**node, "$defs": {"Kind": {"type": "integer"}}}  # of the same name, and not the same
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in (("a.b", node), ("c", other))]
    schema = schema_of(tools=tools, tool_choice="required")
    moved = schema["$defs"]["a.b"]
    assert schema["items"]["anyOf"][0]["properties"]["arguments"] == {"$ref": "#/$defs/a.b"}
    assert moved["properties"]["next"]["anyOf"][0] == {"$ref": "#/$defs/a.b"}
    assert moved["properties"]["kind"] == {"$ref": "#/$defs/a.b/$defs/Kind"}
    assert moved["properties"]["$ref"] == {"const": {"$ref": "#"}}
    assert moved["$defs"] == node["$defs"]
    assert schema["$defs"]["c"]["$defs"] == other["$defs"]
    schema_of(tools=[tool("odd", **{"$defs": [1], "properties": 2, "const": 3})], tool_choice="required")
    alone = {"type": "object", "properties": {}}
    schema = schema_of(tools=[tool("d", **alone)], tool_choice="required")
    assert schema["items"]["properties"]["arguments"] == alone
    assert "$defs" not in schema

"""No input to the OpenAI-compatible API gives anything but an answer or an error in OpenAI's shape.

Everything up to the group is the real thing; the group ends every request at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.core.plan import GroupInfo
from outrider.router.frontend import Frontend
from outrider.router.grammar_door import GrammarDoor
from outrider.router.http.app import Served, make_app
from outrider.router.http.fields import UNSUPPORTED, ChatRequest, CommonRequest, CompletionRequest
from outrider.router.http.translate import Translated, translate_completion
from outrider.router.requests import NewRequest
from outrider.router.sampling_params import Defaults
from outrider.router.tokenizer import TextTokenizer
from outrider.router.transcript import Update
from outrider.testing import write_toy_model
from outrider.v1 import group_pb2

INFO = GroupInfo("g", "toy", "", 258, 256, 64, 16, 256, 1, True, "float32")
FIELDS: dict[str, type[CommonRequest]] = {"chat/completions": ChatRequest, "completions": CompletionRequest}


class EndsAtOnce:
    """An owner whose every request is over with one token."""

    info = INFO

    async def submit(self, request: NewRequest) -> tuple[Any, Update]:
        return self, Update(1, 1, len(request.prompt_tokens), ())

    async def watch(
        self, request_id: str, from_position: int, generation: int = 0, choice: int = 0
    ) -> AsyncIterator[Update]:
        yield Update(1, 1, from_position, (65,), group_pb2.Finish(reason=group_pb2.FINISH_REASON_LENGTH))

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool:
        return False


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_toy_model(tmp_path_factory.mktemp("toy"))
    tokenizer = TextTokenizer(folder)
    grammars = GrammarDoor(folder, tokenizer)
    frontend = Frontend(EndsAtOnce(), tokenizer, grammars, Defaults(), default_timeout_s=60.0)
    yield make_app(
        Served(frontend, tokenizer, ("toy",), lambda: INFO.max_model_len, lambda: "ready", is_alive=lambda: True)
    )
    grammars.close()


NAMES = ["$ref", "name", "auto", "required", "none", "function", "user", "assistant", "tool", "text", "json_object"]
TEXTS = ["", "Once upon", "greedy", "rejection", '{"a": 1e999}', "[" * 999, *"a#{é\x00\ufffd"]
words = st.sampled_from([*NAMES, *TEXTS])
numbers = st.one_of(
    st.integers(-3, 30),
    st.sampled_from([2**31, 2**32 - 1, 2**32, 2**63, 2**64, -(2**63), 10**400, 1e-320, 0.5, 1.0, 1e39, 1e308, -0.0]),
    st.floats(),  # NaN and infinities too, as JSON must not hold them and Python's parser takes them
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"])},
        optional={
            "content": st.one_of(
                words, st.none(), st.lists(st.fixed_dictionaries({"type": words}, optional={"text": words}))
            ),
            "tool_calls": st.lists(
                st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": words, "arguments": words})}),
                max_size=2,
            ),
            "refusal": words,
            "name": words,
        },
    ),
    max_size=3,
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": words}, optional={"parameters": anything}),
        }
    ),
    max_size=2,
)
LIKELY = {"messages": messages, "tools": tools, "prompt": st.one_of(words, st.lists(st.integers(0, 300), max_size=4))}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route, and a request that is right but for a few fields."""
    route = draw(st.sampled_from(sorted(FIELDS)))
    body: dict[str, Any] = (
        {"prompt": "a"} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    names = sorted(FIELDS[route].model_fields)
    for name in draw(st.lists(st.sampled_from(names), max_size=4)):
        body[name] = draw(st.one_of(LIKELY[name], anything) if name in LIKELY else anything)
    return route, body


def check(answer: httpx.Response, asked: object) -> None:
    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} in the answer to {asked!r}")

    assert answer.status_code < 500, (asked, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        bodies = [json.loads(event, parse_constant=refused) for event in events[:-1]]
    else:
        bodies = [json.loads(answer.content, parse_constant=refused)]
    for body in bodies:
        if answer.status_code != 200:
            assert set(body) == {"error"}, asked
        if "error" in body:
            error = body["error"]
            assert set(error) == {"message", "type", "param", "code"}, asked
            assert error["message"]
            assert error["code"]
            assert error["param"] is None or (isinstance(error["param"], str) and error["param"]), asked
            assert "Traceback" not in error["message"]


def test_each_field_of_openais_own_client_is_known() -> None:
    """Taken, or refused with a reason: never as a word that nobody heard of."""
    from openai.types import completion_create_params as texts
    from openai.types.chat import completion_create_params as chats

    for params, model in (
        (chats.CompletionCreateParamsStreaming, ChatRequest),
        (texts.CompletionCreateParamsStreaming, CompletionRequest),
    ):
        assert set(params.__annotations__) <= set(model.model_fields)
    assert set(UNSUPPORTED) <= set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)


async def send(app: Any, route: str, content: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)  # raises what the application does not catch
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(f"/v1/{route}", content=content)


async def test_one_body_is_not_copied_without_limit(app: Any) -> None:
    """Each prompt gets a copy of what stands beside the prompts."""
    beside = {"bad_words": ["x" * 20_000]}
    answer = await send(app, "completions", json.dumps({"prompt": ["a"] * 1000, **beside}).encode())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert error["message"].startswith("prompt is '1000 prompts with 20")
    answer = await send(app, "completions", json.dumps({"prompt": ["a"] * 2, **beside}).encode())
    assert answer.json().get("error", {}).get("param") != "prompt"


async def test_long_bodies_are_read_beside_the_event_loop(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noted(request: CompletionRequest) -> Translated:
        threads.append(threading.current_thread())
        return translate_completion(request)

    monkeypatch.setattr("outrider.router.http.app.translate_completion", noted)
    for prompt in ("a", "a" * 20_000):
        check(await send(app, "completions", json.dumps({"prompt": prompt}).encode()), prompt)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize("route", sorted(FIELDS))
@pytest.mark.parametrize("number", [65, 2**32 - 1])
async def test_nobody_makes_room_for_choices_that_are_refused(app: Any, route: str, number: int) -> None:
    prompt = {"prompt": "a"} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    functions = [{"type": "function", "function": {"name": "f"}}] if route != "completions" else None
    body = {**prompt, "n": number, **({"tools": functions} if functions else {"best_of": number})}
    answer = await send(app, route, json.dumps(body).encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=requests())
def test_no_request_is_too_strange(app: Any, asked: tuple[str, dict[str, Any]]) -> None:
    route, body = asked
    check(asyncio.run(send(app, route, json.dumps(body).encode())), asked)


@settings(max_examples=100, deadline=None)
@given(content=st.one_of(st.binary(max_size=40), anything.map(lambda value: json.dumps(value).encode())))
def test_no_body_is_too_strange(app: Any, content: bytes) -> None:
    for route in FIELDS:
        answer = asyncio.run(send(app, route, content))
        check(answer, content)
        assert answer.status_code in (200, 400, 404)

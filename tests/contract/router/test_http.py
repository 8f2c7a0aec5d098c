"""The HTTP door of a router: OpenAI's official client, plain HTTP, and a target that does what a test says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from outrider.core.errors import ConfigError
from outrider.router.group import GroupSettings
from outrider.router.server import RouterServer
from outrider.testing import ToyModel

PROMPT = "Once upon"
CHAT = [{"role": "user", "content": "hi"}]
CHAT_LENGTH = len("hi\n") + 1  # as the toy's template writes it; <|user|> is one token
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
DEADLINE_S = 60.0
# A step of a target that is paused must not end, however slow the machine is.
PATIENT = GroupSettings(
    step_timeout_s=2 * DEADLINE_S, attach_timeout_s=30.0, grace_s=60.0, poll_s=0.05, retry_s=0.05, keep_s=30.0
)


def expected(count: int, prompt: str = PROMPT, choice: int = 0) -> str:
    return bytes(ToyModel().output(list(prompt.encode()), count, choice)).decode()


def openai_client(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S, **options)


@pytest.fixture
async def client(world: Any) -> AsyncIterator[Any]:
    """Makes clients of a router by its URL."""
    made: list[openai.AsyncOpenAI] = []

    def make(server: RouterServer | str, **options: Any) -> openai.AsyncOpenAI:
        made.append(openai_client(server if isinstance(server, str) else server.http_url, **options))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def get(url: str, path: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=DEADLINE_S, **options) as http:
        return await http.get(url.removesuffix("/v1") + path)


# Whether it lives.


async def test_ready_only_once_the_target_answers(world: Any, client: Any) -> None:
    server = await world.router(wait=False)
    assert (await get(server.http_url, "/health")).status_code == 503
    ready = await get(server.http_url, "/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "waiting for a target"})
    with pytest.raises(openai.InternalServerError) as caught:
        await client(server).completions.create(model=world.folder.name, prompt=PROMPT)
    assert caught.value.status_code == 503
    target = await world.target()

    async def is_ready() -> bool:
        return (await get(server.http_url, "/ready")).json() == {"status": "ready"}

    await world.until(is_ready, "the router is ready", timeout_s=DEADLINE_S)
    for path in ("/health", "/ping", "/ready", "/version", "/load", "/v1/models"):
        assert (await get(server.http_url, path)).status_code == 200, path
    assert (await get(server.http_url, "/load")).json() == {"server_load": 0}
    await target.stop()

    async def is_dead() -> bool:
        return (await get(server.http_url, "/health")).status_code == 503

    await world.until(is_dead, "it says that the engine is dead", timeout_s=DEADLINE_S)
    assert (await get(server.http_url, "/ping")).status_code == 503
    ready = await get(server.http_url, "/ready")
    assert (ready.status_code, ready.json()["status"].partition(":")[0]) == (503, "lost")


async def test_draining_is_not_ready_and_streams_finish(world: Any, client: Any) -> None:
    target = await world.target()
    server = await world.router(times=PATIENT)
    target.pause()  # the answer begins, its text waits
    stream = await client(server).completions.create(
        model=world.folder.name, prompt=PROMPT, max_tokens=30, temperature=0, stream=True
    )
    stopping = asyncio.create_task(server.stop(DEADLINE_S))

    async def drains() -> bool:
        ready = await get(server.http_url, "/ready")
        return ready.status_code == 503 and ready.json() == {"status": "draining"}

    await world.until(drains, "it drains", timeout_s=DEADLINE_S)
    assert (await get(server.http_url, "/health")).status_code == 200
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        await client(server).completions.create(model=world.folder.name, prompt=PROMPT)
    target.resume()
    texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == expected(30)
    await asyncio.wait_for(stopping, DEADLINE_S)
    with pytest.raises(httpx.ConnectError):
        await get(server.http_url, "/health")


async def test_sigterm_lets_streams_finish(world: Any, client: Any, tmp_path: Path) -> None:
    target = await world.target()
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(world.config().model_dump(mode="json")))
    command = [sys.executable, "-P", "-m", "outrider.router", "-f", str(file), "--router-id", "own"]
    command += ["--redis", world.redis_url, "--grace", str(DEADLINE_S)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    router = subprocess.Popen(command, env=environment)  # noqa: ASYNC220 - starts at once
    try:
        url = ""

        async def registered() -> bool:
            nonlocal url
            url = (await world.registry.members("router")).get("own", {}).get("http_url", "")
            return bool(url) or router.poll() is not None

        await world.until(registered, "the router registers", timeout_s=DEADLINE_S)
        target.pause()
        stream = await client(url).completions.create(
            model=world.folder.name, prompt=PROMPT, max_tokens=30, temperature=0, stream=True
        )
        router.send_signal(signal.SIGTERM)

        async def drains() -> bool:
            return (await get(url, "/ready")).status_code == 503

        await world.until(drains, "it drains", timeout_s=DEADLINE_S)
        target.resume()
        texts = [chunk.choices[0].text async for chunk in stream]
        assert "".join(texts) == expected(30)
        assert await asyncio.to_thread(router.wait, DEADLINE_S) == 0
    finally:
        router.kill()
        router.wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_request(world: Any, stream: bool) -> None:
    target = await world.target()
    server = await world.router(times=PATIENT)
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": stream}
    target.pause()
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        task = asyncio.create_task(http.post(f"{server.http_url}/completions", json=body))
        await world.until(lambda: server.group.num_unfinished == 1, "the request runs", timeout_s=DEADLINE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await world.until(lambda: server.group.num_unfinished == 0, "it is aborted", timeout_s=DEADLINE_S)
    target.resume()
    assert target.num_steps < 400
    assert (await get(server.http_url, "/load")).json() == {"server_load": 0}


# Who may come in, and how.


async def test_keys_come_from_a_file_and_change_with_it(world: Any, client: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst\n\nsecond\n")
    await world.target()
    server = await world.router(router={"api_key_file": str(keys)})
    with pytest.raises(openai.AuthenticationError) as caught:
        await client(server).models.list()
    assert caught.value.code == "invalid_api_key"
    for key in ("first", "second"):
        assert (await client(server).with_options(api_key=key).models.list()).data[0].id == world.folder.name
    assert (await get(server.http_url, "/health")).status_code == 200
    assert (await get(server.http_url, "/ready")).status_code == 200
    for path in ("/metrics", "/load"):  # they tell of other clients' requests
        assert (await get(server.http_url, path)).status_code == 401
    keys.write_text("third key\n")
    with pytest.raises(openai.AuthenticationError):
        await client(server).with_options(api_key="first").models.list()
    await client(server).with_options(api_key="third key").models.list()
    keys.unlink()  # what held before holds on
    await client(server).with_options(api_key="third key").models.list()
    keys.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="api_key_file"):
        await world.router(router={"api_key_file": str(keys)})


def write_key_pair(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine that signed itself, and its key."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=outrider", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names, *files], check=True, capture_output=True, timeout=30)
    return certificate, key


async def test_tls_by_a_key_pair_and_a_ca(world: Any, tmp_path: Path) -> None:
    import ssl

    certificate, key = write_key_pair(tmp_path)
    pair = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    await world.target()
    server = await world.router(router=pair)
    assert server.http_url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(certificate))
    assert (await get(server.http_url, "/v1/models", verify=trusting)).status_code == 200
    with pytest.raises(httpx.ConnectError):
        await get(server.http_url, "/v1/models")  # signed by nobody whom it knows
    await server.stop(0.0)

    server = await world.router(router={**pair, "ssl_ca_certs": str(certificate)}, router_id="router-1")
    with pytest.raises(httpx.TransportError):
        await get(server.http_url, "/v1/models", verify=ssl.create_default_context(cafile=str(certificate)))
    trusting.load_cert_chain(certificate, key)
    assert (await get(server.http_url, "/v1/models", verify=trusting)).status_code == 200
    key.write_text("no key")
    with pytest.raises(ConfigError, match="ssl_certfile"):
        await world.router(router=pair)


async def test_where_it_listens(world: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"router.http_port: cannot listen on 127.0.0.1:{port}"):
            await world.router(wait=False, router={"http_port": port})
    server = await world.router(wait=False, router={"http_port": None})
    assert server.http_url == ""


# What is asked and answered.


async def test_choices_of_several_prompts(world: Any, client: Any) -> None:
    await world.target()
    server = await world.router(router={"served_model_name": ["toy", "alias"]})
    prompts = [PROMPT, "Once more"]
    answer = await client(server).completions.create(model="alias", prompt=prompts, n=2, max_tokens=7, seed=-1)
    assert answer.model == "alias"
    assert [(choice.index, choice.text) for choice in sorted(answer.choices, key=lambda choice: choice.index)] == [
        (2 * number + choice, expected(7, prompt, choice)) for number, prompt in enumerate(prompts) for choice in (0, 1)
    ]
    assert answer.usage.completion_tokens == 28
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.to_dict().get("metrics") is None
    ids = await client(server).completions.create(
        model="toy", prompt=[list(prompt.encode()) for prompt in prompts], max_tokens=7, temperature=0, echo=True
    )
    assert [choice.text for choice in ids.choices] == [prompt + expected(7, prompt) for prompt in prompts]

    stream = await client(server).completions.create(
        model="toy", prompt=prompts, n=2, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    texts = [""] * 4
    chunks = [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (sum(map(len, prompts)), 28)


async def test_usage_tells_what_the_prefix_cache_gave(world: Any, client: Any) -> None:
    """In blocks of four tokens, and one for each character."""
    await world.target()
    server = await world.router()
    asked: dict[str, Any] = {"model": world.folder.name, "max_tokens": 2, "temperature": 0}
    completions = client(server).completions
    usages = [
        (await completions.create(prompt=prompt, **asked)).usage
        for prompt in ("Once upon a time", "Once upon a hill", ["Once upon a tree", "Twice", "Once upon"])
    ]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [0, 12, 12 + 0 + 8]
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await completions.create(prompt="Once upon a bird", **asked, stream=True, stream_options=options)
    *_, before, last = [chunk.usage async for chunk in stream]
    assert before.prompt_tokens == last.prompt_tokens == 16
    assert last.prompt_tokens_details.cached_tokens == 12
    async with await world.client(server, DEADLINE_S) as grpc:
        usage = (await grpc.generate("Once upon a wish", max_tokens=2, n=2)).usage
        assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (16, 12)
        fresh = await grpc.generate("Once upon a wish", max_tokens=2, prompt_logprobs=0)
        assert fresh.usage.cached_prompt_tokens == 0  # log-probabilities of a prompt are computed anew


async def test_what_is_too_much_is_refused_for_now(world: Any, client: Any) -> None:
    target = await world.target()
    server = await world.router(times=PATIENT, router={"max_num_seqs": 1, "max_queue": 1})
    target.pause()
    asked = [
        asyncio.create_task(client(server).completions.create(model=world.folder.name, prompt=PROMPT, max_tokens=3))
        for _ in range(2)
    ]
    await world.until(lambda: server.group.num_unfinished == 2, "two requests run or wait", timeout_s=DEADLINE_S)
    with pytest.raises(openai.RateLimitError) as caught:
        await client(server).completions.create(model=world.folder.name, prompt=PROMPT)
    assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("queue_full", "1")
    target.resume()
    for answer in await asyncio.gather(*asked):
        assert answer.choices[0].text == expected(3)


async def test_an_id_is_the_clients_and_in_use_once(world: Any, client: Any) -> None:
    target = await world.target()
    server = await world.router(times=PATIENT)
    target.pause()
    asked = {"model": world.folder.name, "prompt": PROMPT, "max_tokens": 3}
    own = {**asked, "extra_body": {"request_id": "mine"}}
    first = asyncio.create_task(client(server).completions.create(**own))
    await world.until(lambda: server.group.num_unfinished == 1, "the request runs", timeout_s=DEADLINE_S)
    with pytest.raises(openai.ConflictError) as caught:
        await client(server).completions.create(**own)
    assert caught.value.code == "request_id_in_use"
    # A header is no such id: a proxy sends the same one again when it tries again, and may send a long one.
    headers = [{"X-Request-Id": value} for value in ("mesh", "mesh", "m" * 100, "m" * 3000)]
    others = [asyncio.create_task(client(server).completions.create(**asked, extra_headers=each)) for each in headers]
    await world.until(lambda: server.group.num_unfinished == 5, "all run", timeout_s=DEADLINE_S)
    target.resume()
    answer = await first
    assert (answer.id, answer._request_id) == ("cmpl-mine", "mine")
    answers = await asyncio.gather(*others)
    assert [answer.id for answer in answers[:3]] == ["cmpl-mesh", "cmpl-mesh", "cmpl-" + "m" * 100]
    assert [answer._request_id for answer in answers[:3]] == ["mesh", "mesh", "m" * 100]
    assert all(answer.choices[0].text == expected(3) for answer in answers)


async def test_a_stream_of_several_prompts_begins_when_all_are_admitted(world: Any, client: Any) -> None:
    await world.target()
    server = await world.router(router={"served_model_name": "toy"})
    with pytest.raises(openai.BadRequestError) as caught:
        await client(server).completions.create(model="toy", prompt=[PROMPT, "x" * 600], stream=True)
    assert (caught.value.param, caught.value.code) == ("prompt[1]", "context_length_exceeded")
    await world.until(lambda: server.group.num_unfinished == 0, "the first is aborted", timeout_s=DEADLINE_S)


async def test_draining_ends_connections_that_are_kept_alive(world: Any, client: Any) -> None:
    target = await world.target()
    server = await world.router(times=PATIENT, router={"served_model_name": "toy"})
    host, port = server.http_url.removeprefix("http://").removesuffix("/v1").split(":")

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
        writer.write(request)
        await writer.drain()
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)

    get_ready = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
    idle, busy = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    assert b"connection: close" not in (await ask(*idle, get_ready)).lower()
    assert await asyncio.wait_for(idle[0].readexactly(len(b'{"status":"ready"}')), DEADLINE_S)
    target.pause()
    body = json.dumps({"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await ask(*busy, head + body)).startswith(b"HTTP/1.1 200")
    stopping = asyncio.create_task(server.stop(DEADLINE_S))
    assert await asyncio.wait_for(idle[0].read(), DEADLINE_S) == b""  # it waited for a request: it is ended
    late = await asyncio.open_connection(host, int(port))
    answer = (await ask(*late, get_ready)).lower()
    assert answer.startswith(b"http/1.1 503")
    assert b"connection: close" in answer
    assert (await asyncio.wait_for(late[0].read(), DEADLINE_S)).endswith(b'{"status":"draining"}')
    target.resume()
    rest = await asyncio.wait_for(busy[0].read(), DEADLINE_S)  # to its end, although its head promised to keep it
    assert b"data: [DONE]" in rest
    await asyncio.wait_for(stopping, DEADLINE_S)
    for _, writer in (idle, busy, late):
        writer.close()


async def test_a_fault_in_the_server_has_openais_shape(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not foreseen."""
    from outrider.router.http import app

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("a secret")

    await world.target()
    server = await world.router()
    monkeypatch.setattr(app, "translate_completion", fails)
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        answer = await http.post(f"{server.http_url}/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert answer.headers["x-should-retry"] == "false"


async def test_what_fails_once_the_answer_began_ends_it_with_an_error(world: Any, client: Any) -> None:
    await world.target(nan_prompts=(tuple(PROMPT.encode()),))
    server = await world.router()
    asked = {"model": world.folder.name, "prompt": PROMPT}
    stream = await client(server).completions.create(**asked, stream=True)
    with pytest.raises(openai.APIError, match="failed") as caught:
        [chunk async for chunk in stream]
    assert caught.value.code == "generation_failed"
    with pytest.raises(openai.InternalServerError, match="failed"):
        await client(server).completions.create(**asked)
    assert (await client(server).completions.create(**{**asked, "prompt": "Other"})).usage.completion_tokens == 16


async def test_calls_of_tools_in_the_models_own_words(world: Any, client: Any) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = f"Let me see. {call}{call}"
    await world.target(ToyModel().saying(said, CHAT_LENGTH, end=True))
    server = await world.router(router={"served_model_name": "toy"})
    asked: dict[str, Any] = {"model": "toy", "messages": CHAT, "temperature": 0, "tools": [TOOL]}
    choice = (await client(server).chat.completions.create(**asked)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see. "
    assert [item.function.to_dict() for item in choice.message.tool_calls] == [
        {"name": "add", "arguments": '{"a": 1}'}
    ] * 2
    async with client(server).chat.completions.stream(**asked) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert [item.function.arguments for item in streamed.message.tool_calls] == ['{"a": 1}'] * 2
    without = (await client(server).chat.completions.create(**asked, tool_choice="none")).choices[0]
    assert (without.finish_reason, without.message.content, without.message.tool_calls) == ("stop", said, None)


async def test_messages_reach_the_template(world: Any, client: Any) -> None:
    await world.target()
    (world.folder / "chat_template.jinja").rename(world.folder / "kept")
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson }}{{ mood }}"
    (world.folder / "chat_template.jinja").write_text(template)
    try:
        server = await world.router(router={"served_model_name": "toy"})
    finally:
        (world.folder / "kept").replace(world.folder / "chat_template.jinja")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
        {"role": "assistant", "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "refusal": "I will not."},
    ]
    answer = await client(server).chat.completions.create(
        model="toy",
        messages=messages,
        max_tokens=1,
        tools=[TOOL],
        extra_body={"chat_template_kwargs": {"mood": "calm"}},
    )
    parsed = {**call, "function": {"name": "add", "arguments": {"a": 1}}}
    rendered = "\n".join(
        [
            json.dumps({"role": "system", "content": "be short"}),
            json.dumps({"role": "user", "content": "1\n2"}),
            json.dumps({"role": "assistant", "content": "", "tool_calls": [parsed]}),
            json.dumps({"role": "tool", "content": "3", "tool_call_id": "c1"}),
            json.dumps({"role": "assistant", "content": "I will not."}),
            json.dumps([TOOL]) + "calm",
        ]
    )
    assert answer.usage.prompt_tokens == len(rendered)
    assert answer.choices[0].message.content == expected(1, rendered)


def calling(arguments: str) -> dict[str, Any]:
    """A message that calls a tool."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def tool_with(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 2**32 - 1}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias[999]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop_token_ids": [999]}, "stop_token_ids[0]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
    ({"model": "other"}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "refusal": "no"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [calling("[" * 100_000)]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [calling('{"a": 1e999}')]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [calling('{"a": NaN}')]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [calling('"\\ud800"')]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [calling("no JSON")]}, "messages[0].tool_calls[0].function.arguments"),
    ({"chat_template_kwargs": {"self": 1}}, "messages"),
    ({"tools": [tool_with({"$defs": [1], "$ref": "#/$defs/0"})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool_with({"properties": []})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool_with({"$ref": "#/nowhere"})], "tool_choice": "required"}, "tools"),
    ({"guided_json": {"maximum": float("inf")}}, "guided_json"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"function_call": "auto"}, "function_call"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"cache_salt": "mine"}, "cache_salt"),
    ({"seed": 1.5}, "seed"),
    ({"store": "yes"}, "store"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "bogus"}}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "no blanks"}}]}, "tools[0].function.name"),
    ({"functions": []}, "functions"),
    ({"nonesuch": 1}, "nonesuch"),
]


async def test_every_bad_field_is_refused_by_its_name(world: Any) -> None:
    await world.target()
    server = await world.router(router={"served_model_name": "toy"})
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        for fields, param in BAD:
            body = {"messages": CHAT, "max_tokens": None, **fields}
            content = json.dumps(body).encode()  # which may hold what JSON does not: Infinity
            answer = await http.post(f"{server.http_url}/chat/completions", content=content)
            assert answer.status_code in (400, 404), (fields, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param, (fields, error)
            assert error["type"] == "invalid_request_error"
            assert param.partition("[")[0] in error["message"] or param == "model", error
        for path, content, status in (
            ("/chat/completions", b"{", 400),
            ("/chat/completions", b"[]", 400),
            ("/chat/completions", b'{"model": "toy"}', 400),
            ("/completions", b'{"prompt": []}', 400),
            ("/completions", b'{"prompt": ' + b"[" * 5000 + b"}", 400),
            ("/completions", b'{"prompt": [' + b"1.5," * 5000 + b"1.5]}", 400),
            ("/completions", b'{"prompt": ' + b'[1], "stop": "' + b"x" * (17 << 20) + b'"}', 413),
            ("/completions", b'{"prompt": ["a", [1]]}', 400),
            ("/completions", b'{"prompt": ["a", ""]}', 400),
            ("/completions", b'{"prompt": "a", "best_of": 2}', 400),
            ("/completions", b'{"prompt": "a", "n": 4294967295}', 400),
            ("/completions", b'{"prompt": "a", "n": 4294967295, "best_of": 4294967295}', 400),
            ("/completions", b'{"prompt": "a", "suffix": "b"}', 400),
            ("/completions", b'{"prompt": "\\ud800"}', 400),
            ("/completions", b'{"prompt": "\xff"}', 400),
            ("/completions", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
            ("/completions", b'{"prompt": "a", "logit_bias": {"5": 1e999}}', 400),
            ("/completions", b'{"prompt": "a", "temperature": NaN}', 400),
            ("/nothing", b"{}", 404),
        ):
            answer = await http.post(f"{server.http_url}{path}", content=content)
            assert answer.status_code == status, (content, answer.text)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (await http.get(f"{server.http_url}/completions")).status_code == 405
        assert (await http.get(f"{server.http_url}/models/other")).status_code == 404
        assert (await http.get(f"{server.http_url}/models/toy")).json()["id"] == "toy"
    assert server.group.num_unfinished == 0

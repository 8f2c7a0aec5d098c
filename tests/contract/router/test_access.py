"""The lines that a router's log has of its clients' calls: one for each, and nothing of what they said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from outrider.core.logs import LogSettings, Process, configure, json_formatter
from outrider.router.server import RouterServer
from outrider.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, group_pb2, group_pb2_grpc

SECRET_PROMPT = "Attack at dawn"
SECRET = "xyzzy"
KEY = "sk-very-secret"
ACCESS = "outrider.router.access"


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="outrider")


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[Any]:
    return [record for record in caplog.records if record.name == ACCESS and record.levelno >= level]


async def line(world: Any, caplog: pytest.LogCaptureFixture, count: int = 1) -> Any:
    """The newest line, once there are so many: it is written after the client has its answer."""
    await world.until(lambda: len(lines(caplog)) >= count, f"{count} lines", 60.0)
    assert len(lines(caplog)) == count
    return lines(caplog)[-1]


def written(caplog: pytest.LogCaptureFixture) -> str:
    """The whole log, with all fields."""
    formatter = json_formatter(Process("router", "r", "c"))
    return "\n".join(formatter.format(record) for record in caplog.records)


async def generate(server: RouterServer, **fields: Any) -> None:
    request = generation_pb2.GenerateRequest(text=SECRET_PROMPT, ignore_eos=True, **fields)
    metadata = (("authorization", f"Bearer {KEY}"),)
    async with grpc.aio.insecure_channel(server.address) as channel:
        async for _ in generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            request, metadata=metadata, timeout=60
        ):
            pass


async def post(server: RouterServer, path: str, body: Any, key: str = KEY) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(
            f"{server.http_url}{path}", json=body, headers={"Authorization": f"Bearer {key}", "X-Request-Id": "mine"}
        )


async def test_calls_over_grpc(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    await world.target()
    server = await world.router()
    await generate(server, request_id="r1", max_tokens=5)
    found = await line(world, caplog)
    assert (found.protocol, found.method, found.status) == ("gRPC", "GenerationService/Generate", "OK")
    assert (found.request_id, found.outcome) == ("r1", "length")
    assert (found.prompt_tokens, found.completion_tokens) == (len(SECRET_PROMPT), 5)
    assert 0 < found.ttft_ms <= found.duration_ms
    assert found.peer.startswith("ipv4:127.0.0.1:")
    assert "request r1: 14 + 5 tokens, length" in found.getMessage()

    with pytest.raises(grpc.aio.AioRpcError):
        await generate(server, request_id="r2", n=100_000)
    found = await line(world, caplog, 2)
    assert (found.status, found.request_id, found.outcome) == ("INVALID_ARGUMENT", "r2", "InvalidRequest")

    async with grpc.aio.insecure_channel(server.address) as channel:
        await admin_pb2_grpc.AdminServiceStub(channel).Status(admin_pb2.StatusRequest(), timeout=60)
    await world.until(
        lambda: any(r.method == "AdminService/Status" for r in lines(caplog, logging.DEBUG)), "a quiet line", 60.0
    )
    assert len(lines(caplog)) == 2


async def test_a_client_that_goes_away(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    target = await world.target()
    server = await world.router(times=world.patient)
    target.pause(after=2)  # there is text, and more to come
    request = generation_pb2.GenerateRequest(text=SECRET_PROMPT, request_id="gone", max_tokens=300, ignore_eos=True)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
        async for response in call:
            if response.WhichOneof("event") == "delta":
                break
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.code()
    found = await line(world, caplog)
    target.resume()
    assert (found.status, found.request_id, found.outcome) == ("CANCELLED", "gone", "cancelled")
    assert 0 < found.completion_tokens < 300


async def test_what_is_refused_is_named_and_not_repeated(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Values are the client's, and what is said of a grammar that is wrong quotes it."""
    await world.target()
    server = await world.router()
    fields: list[tuple[dict[str, Any], str]] = [
        ({"stop": [SECRET * 60]}, "stop[0]"),
        ({"sampling": {"bad_words": [SECRET, ""]}}, "sampling.bad_words[1]"),
        ({"sampling": {"grammar": {"regex": f"{SECRET}("}}}, "sampling.grammar.regex"),
        ({"sampling": {"grammar": {"ebnf": f"start: {SECRET}"}}}, "sampling.grammar.ebnf"),
    ]
    for count, (wrong, field) in enumerate(fields, 1):
        with pytest.raises(grpc.aio.AioRpcError, match=re.escape(field)):
            await generate(server, request_id=f"r{count}", **wrong)
        assert (await line(world, caplog, count)).outcome == "InvalidRequest"
        assert f"request r{count}: InvalidRequest: {field}" in [record.getMessage() for record in caplog.records]
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"stop": SECRET * 60}, "stop"),
        ({"guided_regex": f"{SECRET}("}, "guided_regex"),
        ({"guided_grammar": f"start: {SECRET}"}, "guided_grammar"),
        ({"bad_words": [SECRET, ""], "stream": True}, "bad_words[1]"),
    ]
    for count, (body, field) in enumerate(bodies, 1 + len(fields)):
        answer = await post(server, "/completions", {"prompt": SECRET_PROMPT, **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert (await line(world, caplog, count)).outcome == "InvalidRequest"
        assert any(record.getMessage().endswith(f": 400: InvalidRequest: {field}") for record in caplog.records)
    everything = written(caplog)
    assert SECRET not in everything
    assert SECRET_PROMPT not in everything


@pytest.mark.parametrize("bad_id", ["x\nINFO forged", "forged\x1b[2J", "forged" * 1000])
async def test_no_id_writes_lines_of_its_own(world: Any, caplog: pytest.LogCaptureFixture, bad_id: str) -> None:
    await world.target()
    server = await world.router()
    with pytest.raises(grpc.aio.AioRpcError, match="request_id is"):
        await generate(server, request_id=bad_id)
    found = await line(world, caplog)
    assert (found.status, found.outcome) == ("INVALID_ARGUMENT", "InvalidRequest")
    assert len(found.request_id) == 32  # one of the router's
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        asked = generation_pb2.GenerationServiceAbortRequest(request_id=bad_id)
        with pytest.raises(grpc.aio.AioRpcError, match="request_id is"):
            await stub.Abort(asked, timeout=60)
    await line(world, caplog, 2)
    assert "forged" not in written(caplog)


@pytest.mark.parametrize("bad_id", ["x\nINFO forged", "forged\x1b[2J", "forged" * 1000])
async def test_no_id_of_another_router_writes_lines_of_its_own(
    world: Any, caplog: pytest.LogCaptureFixture, bad_id: str
) -> None:
    await world.target()
    server = await world.router()
    async with grpc.aio.insecure_channel(server.group_address) as channel:
        stub = group_pb2_grpc.GroupServiceStub(channel)
        submitted = group_pb2.SubmitRequest(request_id=bad_id, prompt_tokens=[1, 2])
        submitted.sampling.SetInParent()
        for call in (
            lambda: stub.Submit(submitted, timeout=60),
            lambda: stub.Watch(group_pb2.WatchRequest(request_id=bad_id), timeout=60).read(),
            lambda: stub.Abort(group_pb2.AbortRequest(request_id=bad_id), timeout=60),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="request_id is"):
                await call()
    logged = [record.getMessage() for record in caplog.records if record.name.endswith("group_service")]
    assert logged == [f"{what}: InvalidRequest: request_id" for what in ("submit", "watch", "abort")]
    assert "forged" not in written(caplog)


async def test_calls_without_a_key_are_seen(world: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("another")
    server = await world.router(wait=False, router={"api_key_file": str(keys)})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(server)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    found = await line(world, caplog)
    assert (found.method, found.status) == ("GenerationService/Generate", "UNAUTHENTICATED")
    assert found.peer.startswith("ipv4:127.0.0.1:")
    async with grpc.aio.insecure_channel(server.address) as channel:
        for count, method in enumerate(("/outrider.v1.AdminService/Status", "/any.Service/" + "x" * 1000), 2):
            with pytest.raises(grpc.aio.AioRpcError, match="valid key"):
                await channel.unary_unary(method)(b"", timeout=60)
            found = await line(world, caplog, count)
            assert (found.protocol, found.status) == ("gRPC", "UNAUTHENTICATED")
            assert found.method == method.removeprefix("/outrider.v1.")[:200]
    assert KEY not in written(caplog)


async def test_a_client_that_goes_away_while_it_sends(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = await world.router(wait=False)
    url = httpx.URL(server.http_url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await world.until(lambda: server._http._server.server_state.tasks, "the request is being read")
    writer.close()
    found = await line(world, caplog)
    assert (found.method, found.status) == ("POST /v1/completions", "499")
    assert [record for record in caplog.records if record.exc_info] == []


async def test_calls_over_http(world: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    await world.target()
    server = await world.router(router={"api_key_file": str(keys)})
    body = {"prompt": SECRET_PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = await post(server, "/completions", body)
    assert answer.status_code == 200, answer.text
    found = await line(world, caplog)
    assert (found.protocol, found.method, found.status) == ("HTTP", "POST /v1/completions", "200")
    assert "mine" in found.request_id
    assert (found.prompt_tokens, found.completion_tokens, found.outcome) == (len(SECRET_PROMPT), 3, "length")

    answer = await post(server, "/completions", {**body, "prompt": [SECRET_PROMPT, SECRET_PROMPT]})
    assert answer.status_code == 200, answer.text
    found = await line(world, caplog, 2)  # two requests, one call
    assert (found.prompt_tokens, found.completion_tokens) == (2 * len(SECRET_PROMPT), 6)

    answer = await post(server, "/completions", {**body, "stream": True})
    assert answer.text.endswith("[DONE]\n\n")
    found = await line(world, caplog, 3)
    assert (found.status, found.completion_tokens) == ("200", 3)

    for number, (path, content, key, status) in enumerate(
        [
            ("/completions", {**body, "temperature": -1}, KEY, "400"),
            ("/nothing", body, KEY, "404"),
            ("/completions", body, "sk-wrong", "401"),
        ],
        4,
    ):
        assert str((await post(server, path, content, key)).status_code) == status
        found = await line(world, caplog, number)
        assert found.status == status
    async with httpx.AsyncClient(timeout=60) as http:
        await http.get(f"{server.http_url.removesuffix('/v1')}/health")
    await world.until(
        lambda: any(r.method == "GET /health" for r in lines(caplog, logging.DEBUG)), "a quiet line", 60.0
    )
    assert len(lines(caplog)) == 6

    everything = written(caplog)
    assert "mine" in everything  # it is the log that is looked at
    for secret in (SECRET_PROMPT, KEY, "sk-wrong"):
        assert secret not in everything


@pytest.fixture
def log_in_json(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of this process, as a router's; afterwards it is as before."""
    root, own = logging.getLogger(), logging.getLogger("outrider")
    before = list(root.handlers), root.level, own.level
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    configure(LogSettings("debug", "json"), Process("router", "router-0", "demo"))
    yield
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


async def test_lines_know_request_and_epoch(
    world: Any, log_in_json: None, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As the process writes them, with what the tasks that log work for."""
    await world.target(epoch=7)
    server = await world.router()
    await generate(server, request_id="r1", max_tokens=5)
    await line(world, caplog)
    written = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    [access] = [entry for entry in written if entry["logger"] == ACCESS and entry["level"] == "INFO"]
    assert (access["request_id"], access["epoch"], access["status"]) == ("r1", 7, "OK")
    [attached] = [entry for entry in written if entry["message"].startswith("attached to")]
    assert attached["epoch"] == 7
    assert "request_id" not in attached
    assert {entry["role"] for entry in written} == {"router"}

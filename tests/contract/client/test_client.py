"""The client: its public surface, what it returns, and what it needs to be imported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

import outrider.client
from outrider.client import (
    AsyncClient,
    Client,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    Unavailable,
)
from outrider.client._completion import timing_from
from outrider.client._request import build_request
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, group_pb2

SURFACE = {
    "AsyncClient": {"abort", "aclose", "generate", "get_settings", "status", "stream", "update_settings"},
    "AsyncStream": {"aclose", "completion", "events", "request_id"},
    "Choice": {"logprobs", "to_dict"},
    "Client": {"abort", "address", "close", "generate", "get_settings", "status", "stream", "update_settings"},
    "Completion": {
        "finish_reason",
        "logprobs",
        "matched_stop",
        "prompt_logprobs",
        "prompt_text",
        "reproducible",
        "speculation",
        "text",
        "timing",
        "to_dict",
        "token_ids",
    },
    "ConfigError": set(),
    "Conflict": set(),
    "DeadlineExceeded": set(),
    "Delta": {"choice", "logprobs"},
    "Endpoint": {
        "api_key",
        "ca_certs",
        "client_cert",
        "client_key",
        "error_of",
        "metadata",
        "named",
        "open_channel",
    },
    "GenerationFailed": set(),
    "InvalidRequest": set(),
    "Message": None,
    "NotFound": set(),
    "Options": None,
    "OutriderError": set(),
    "Overloaded": set(),
    "Prompt": None,
    "Speculation": {
        "draft_acceptance_rate",
        "free_acceptance_rate",
        "grammar_ms",
        "mean_acceptance_length",
        "num_forced_accepted",
        "num_forced_tokens",
        "to_dict",
    },
    "Stream": {"close", "completion", "events", "request_id"},
    "Timing": {"to_dict"},
    "TokenLogprob": {"to_dict", "top"},
    "TopLogprob": set(),
    "Unauthenticated": set(),
    "Unavailable": set(),
    "Usage": {"cached_prompt_tokens"},
}


def test_the_public_surface() -> None:
    assert set(outrider.client.__all__) == set(SURFACE)
    for name, members in SURFACE.items():
        if members is None:
            continue
        kind = getattr(outrider.client, name)
        public = {member for member in vars(kind) if not member.startswith("_")}
        assert public == members, name


def test_it_needs_nothing_of_a_server() -> None:
    script = (
        "import sys, outrider.client; "
        "print([m for m in ('torch', 'numpy', 'redis', 'ray', 'tokenizers', 'yaml', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Says "Hello wörld" in three messages, with a proposal of four of which three were accepted."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()
        self.hang = False

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        started = generation_pb2.Started(seed=7, verifier=common_pb2.VERIFIER_COUPLED, prompt_tokens=2, group_id="g")
        yield generation_pb2.GenerateResponse(request_id="abc", started=started)
        for text, tokens in (("Hello ", [1]), ("", [2, 3]), ("wörld", [4])):
            yield generation_pb2.GenerateResponse(
                request_id="abc", delta=generation_pb2.Delta(text=text, token_ids=tokens)
            )
        if self.hang:
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled.set()
        stats = group_pb2.SpeculationStats(
            verifier=common_pb2.VERIFIER_COUPLED,
            drafter="model",
            num_spec_steps=1,
            num_draft_tokens=4,
            num_accepted_tokens=3,
            acceptance_histogram=[0, 0, 0, 1, 0],
            target_calls=1,
            num_forced_tokens=1,
            num_forced_accepted=1,
            grammar_ms=0.25,
        )
        finish = group_pb2.Finish(
            reason=group_pb2.FINISH_REASON_STOP, matched_stop="!", reproducible=True, speculation=stats
        )
        finished = generation_pb2.Finished(finish=finish, prompt_tokens=2, completion_tokens=4)
        yield generation_pb2.GenerateResponse(request_id="abc", finished=finished)


@contextlib.asynccontextmanager
async def serving(servicer: Scripted) -> AsyncIterator[str]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
def threaded() -> Iterator[str]:
    """A server in a thread with its own loop, for the synchronous client."""
    ready, stop = threading.Event(), threading.Event()
    address = ""

    def run() -> None:
        async def serve() -> None:
            nonlocal address
            async with serving(Scripted()) as address:
                ready.set()
                await asyncio.to_thread(stop.wait)

        asyncio.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    yield address
    stop.set()
    thread.join(10)


async def test_a_completion_is_the_documented_object() -> None:
    async with serving(Scripted()) as address, AsyncClient(address, timeout=60) as client:
        answer = (await client.generate("hi")).to_dict()
    timing = answer.pop("timing")
    assert answer == {
        "request_id": "abc",
        "text": "Hello wörld",
        "token_ids": [1, 2, 3, 4],
        "finish_reason": "stop",
        "matched_stop": "!",
        "logprobs": None,
        "prompt_logprobs": None,
        "usage": {"prompt_tokens": 2, "completion_tokens": 4},
        "seed": 7,
        "reproducible": True,
        "speculation": {
            "verifier": "coupled",
            "drafter": "model",
            "num_spec_steps": 1,
            "num_draft_tokens": 4,
            "num_accepted_tokens": 3,
            "draft_acceptance_rate": 0.75,
            "mean_acceptance_length": 4.0,
            "acceptance_histogram": [0, 0, 0, 1, 0],
            "target_calls": 1,
            "num_forced_tokens": 1,
            "num_forced_accepted": 1,
            "free_acceptance_rate": 2 / 3,
            "grammar_ms": 0.25,
        },
    }
    assert list(timing) == ["ttft_ms", "itl_ms", "total_ms"]
    assert list(timing["itl_ms"]) == ["p50", "p99"]
    assert 0 < timing["ttft_ms"] <= timing["total_ms"]
    assert 0 <= timing["itl_ms"]["p50"] <= timing["itl_ms"]["p99"]
    json.dumps(answer)


async def test_streams_give_text_or_events() -> None:
    async with serving(Scripted()) as address, AsyncClient(address, timeout=60) as client:
        async with client.stream("hi") as stream:
            with pytest.raises(OutriderError, match="has not ended"):
                _ = stream.completion
            assert [text async for text in stream] == ["Hello ", "wörld"]
        assert stream.request_id == "abc"
        async with client.stream("hi") as stream:
            assert [delta.token_ids async for delta in stream.events()] == [(1,), (2, 3), (4,)]


async def test_leaving_a_stream_cancels_the_request() -> None:
    servicer = Scripted()
    servicer.hang = True
    async with serving(servicer) as address, AsyncClient(address, timeout=60) as client:
        async with client.stream("hi") as stream:
            async for _ in stream:
                break
        async with asyncio.timeout(60):
            await servicer.cancelled.wait()


async def test_a_closed_stream_is_an_error_and_no_cancellation_of_its_reader() -> None:
    servicer = Scripted()
    servicer.hang = True
    async with serving(servicer) as address, AsyncClient(address, timeout=60) as client:
        stream = client.stream("hi")
        texts = aiter(stream)
        assert await anext(texts)
        await stream.aclose()
        with pytest.raises(OutriderError, match="was closed"):
            await anext(texts)


async def test_every_call_has_a_deadline() -> None:
    servicer = Scripted()
    servicer.hang = True
    async with serving(servicer) as address, AsyncClient(address, timeout=0.3) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("hi")


async def test_nobody_there() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=60) as client:
        with pytest.raises(Unavailable, match=r"no answer from 127\.0\.0\.1:1 .*is the cluster up\?"):
            await client.generate("hi")


def test_the_synchronous_client(threaded: str) -> None:
    with Client(threaded, timeout=60) as client:
        assert client.generate("hi", max_tokens=3).text == "Hello wörld"
        with client.stream("hi") as stream:
            assert list(stream) == ["Hello ", "wörld"]
        assert stream.completion.usage.completion_tokens == 4
        assert [delta.text for delta in client.stream("hi").events()] == ["Hello ", "", "wörld"]
        with pytest.raises(InvalidRequest, match="seed"):
            client.generate("hi", seed=-1)


def test_the_address_from_the_environment(threaded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ADDRESS", threaded)
    with Client(timeout=60) as client:
        assert client.generate("hi").text == "Hello wörld"
    monkeypatch.delenv("OUTRIDER_ADDRESS")
    with pytest.raises(ConfigError, match="OUTRIDER_ADDRESS"):
        Client()


def test_options_become_the_fields_of_the_request() -> None:
    request = build_request(
        "hi",
        max_tokens=3,
        temperature=0,
        top_k=5,
        top_p=0.5,
        seed=2**64 - 1,
        verifier="rejection",
        stop="x",
        stop_token_ids=[4],
        num_speculative_tokens=0,
        request_id="r",
    )
    assert request == generation_pb2.GenerateRequest(
        request_id="r",
        text="hi",
        sampling=generation_pb2.SamplingParams(
            temperature=0.0, top_k=5, top_p=0.5, seed=2**64 - 1, verifier=common_pb2.VERIFIER_REJECTION
        ),
        max_tokens=3,
        stop=["x"],
        stop_token_ids=[4],
        num_speculative_tokens=0,
    )
    bare = build_request([1, 2])
    assert not bare.HasField("max_tokens")
    assert not bare.HasField("num_speculative_tokens")
    assert not bare.sampling.HasField("temperature")
    assert list(bare.token_ids.ids) == [1, 2]
    assert build_request([{"role": "user", "content": "hi"}]).chat.messages[0].content == "hi"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"seed": -1}, "sampling.seed"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"seed": 1.5}, "sampling.seed"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"verifier": "best"}, "sampling.verifier"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": "\ud800"}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"temperature": 10**400}, "sampling.temperature"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"top_p": math.inf}, "sampling.top_p"),
        ({"stop_token_ids": 4}, "stop_token_ids"),
        ({"n": -1}, "n"),
        ({"echo": 1}, "echo"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"min_p": math.nan}, "sampling.min_p"),
        ({"typical_p": -math.inf}, "sampling.typical_p"),
        ({"frequency_penalty": "2"}, "sampling.frequency_penalty"),
        ({"logit_bias": [1]}, "sampling.logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias[-1]"),
        ({"logit_bias": {"one": 1.0}}, "sampling.logit_bias[one]"),
        ({"logit_bias": {5: math.nan}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, "sampling.logit_bias[5]"),
        ({"bad_words": ["a", 1]}, "sampling.bad_words[1]"),
        ({"allowed_token_ids": 5}, "sampling.allowed_token_ids"),
        ({"banned_token_ids": [1, 1.5]}, "sampling.banned_token_ids[1]"),
        ({"min_tokens": -1}, "sampling.min_tokens"),
        ({"logprobs": True}, "sampling.logprobs"),
        ({"prompt_logprobs": -1}, "sampling.prompt_logprobs"),
        ({"logprobs_mode": "cooked"}, "sampling.logprobs_mode"),
        ({"json_schema": "{"}, "sampling.grammar.json_schema"),
        ({"json_schema": {"maximum": math.nan}}, "sampling.grammar.json_schema"),
        ({"json_schema": '{"maximum": NaN}'}, "sampling.grammar.json_schema"),
        ({"json_schema": {"enum": {1, 2}}}, "sampling.grammar.json_schema"),
        ({"regex": 1}, "sampling.grammar.regex"),
        ({"ebnf": "\ud800"}, "sampling.grammar.ebnf"),
        ({"regex": "a", "ebnf": "start: /a/"}, "sampling.grammar"),
        ({"controls": ["min_p"]}, "sampling.controls"),
        ({"controls": {"min_p": 0.1}, "min_p": 0.1}, "sampling.min_p"),
        ({"controls": {"novel": {"a": [1, math.nan]}}}, "sampling.novel[a][1]"),
        ({"controls": {"novel": 2**60}}, "sampling.novel"),
        ({"controls": {"novel": {1, 2}}}, "sampling.novel"),
    ],
)
def test_what_a_field_cannot_hold_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request("hi", **options)
    assert caught.value.field == field


async def test_live_settings_that_no_field_holds() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=60) as client:
        for options in ({"num_speculative_tokens": -1}, {"verifier": "lucky"}):
            with pytest.raises(InvalidRequest) as caught:
                await client.update_settings(**options)  # type: ignore[arg-type]
            assert caught.value.field == f"settings.{next(iter(options))}"


def test_unknown_options_and_prompts() -> None:
    with pytest.raises(TypeError, match="no such option: max_token"):
        build_request("hi", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest) as caught:
        build_request([{"role": "user", "text": "hi"}])
    assert caught.value.field == "chat.messages[0]"
    with pytest.raises(InvalidRequest) as caught:
        build_request([1, -2])
    assert caught.value.field == "token_ids.ids[1]"
    with pytest.raises(InvalidRequest) as caught:
        build_request(b"hi")
    assert caught.value.field == "text"


def test_times_between_messages() -> None:
    for arrivals in ([], [1.5]):
        timing = timing_from(1.0, arrivals, 2.0)
        assert (timing.itl_p50_ms, timing.itl_p99_ms, timing.total_ms) == (None, None, 1000.0)
    timing = timing_from(0.0, [1.0, 5.0, 6.0, 9.0, 11.0], 12.0)  # 4, 1, 3 and 2 seconds apart
    assert (timing.ttft_ms, timing.itl_p50_ms, timing.itl_p99_ms) == (1000.0, 2000.0, 4000.0)

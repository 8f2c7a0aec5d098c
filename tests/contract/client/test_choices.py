"""Several choices, log-probabilities and echo, as a server's messages tell them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.client import AsyncClient, Client, OutriderError, TokenLogprob, TopLogprob, Unavailable
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, group_pb2

TEXTS = (("Hello ", "wörld"), ("Good", "bye"), ("", "Hi"))


def entry(token: int, logprob: float | None, rank: int) -> generation_pb2.TokenLogprob:
    top = [generation_pb2.TopLogprob(token_id=9, token="t9", logprob=-0.5)]
    return generation_pb2.TokenLogprob(
        token_id=token, token=f"t{token}", logprob=logprob, rank=rank, top=top if logprob is not None else []
    )


class Choosing(generation_pb2_grpc.GenerationServiceServicer):
    """Sends the pieces of its choices in turn; they end from the last one to the first."""

    def __init__(self, *, forget_choice: int | None = None) -> None:
        self._forget_choice = forget_choice

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        def response(**event: Any) -> generation_pb2.GenerateResponse:
            return generation_pb2.GenerateResponse(request_id="abc", **event)

        yield response(started=generation_pb2.Started(seed=7, verifier=common_pb2.VERIFIER_COUPLED, prompt_tokens=2))
        sampling = request.sampling
        if request.echo or sampling.HasField("prompt_logprobs"):
            prompt = generation_pb2.Prompt(text=request.text if request.echo else "", token_ids=[5, 6])
            if sampling.HasField("prompt_logprobs"):
                prompt.logprobs.extend([entry(5, None, 0), entry(6, -math.inf, 900)])
            yield response(prompt=prompt)
        count = request.n or 1
        for piece in range(2):
            for choice in range(count):
                token = 10 * choice + piece
                logprobs = [entry(token, -1.5, 2)] if sampling.HasField("logprobs") else []
                yield response(
                    delta=generation_pb2.Delta(
                        text=TEXTS[choice][piece], token_ids=[token], choice=choice, logprobs=logprobs
                    )
                )
        for choice in reversed(range(count)):
            if choice == self._forget_choice:
                continue
            stats = group_pb2.SpeculationStats(drafter="model", num_draft_tokens=choice, num_spec_steps=choice)
            finish = group_pb2.Finish(reason=group_pb2.FINISH_REASON_LENGTH, reproducible=True, speculation=stats)
            yield response(
                finished=generation_pb2.Finished(finish=finish, prompt_tokens=2, completion_tokens=2, choice=choice)
            )


@contextlib.asynccontextmanager
async def connected(servicer: Choosing | None = None) -> AsyncIterator[AsyncClient]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer or Choosing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", timeout=60) as client:
        yield client
    await server.stop(None)


async def test_choices_are_told_apart_and_come_in_order() -> None:
    async with connected() as client:
        answer = await client.generate("hi", n=3)
    assert [(choice.index, choice.text, choice.token_ids) for choice in answer.choices] == [
        (0, "Hello wörld", (0, 1)),
        (1, "Goodbye", (10, 11)),
        (2, "Hi", (20, 21)),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Hello wörld", (0, 1), "length")
    facts = answer.to_dict()
    assert set(facts) == {"request_id", "seed", "usage", "prompt_logprobs", "choices"}
    assert [choice["index"] for choice in facts["choices"]] == [0, 1, 2]
    assert set(facts["choices"][0]) == {
        "index",
        "text",
        "token_ids",
        "finish_reason",
        "matched_stop",
        "usage",
        "reproducible",
        "speculation",
        "timing",
        "logprobs",
    }
    assert [choice["speculation"]["num_draft_tokens"] for choice in facts["choices"]] == [0, 1, 2]
    assert facts["choices"][2]["usage"] == {"prompt_tokens": 2, "completion_tokens": 2}
    json.dumps(facts, allow_nan=False)


async def test_a_stream_of_several_choices_names_them() -> None:
    async with connected() as client:
        async with client.stream("hi", n=2) as stream:
            pieces = [(delta.choice, delta.text) async for delta in stream.events()]
        assert pieces == [(0, "Hello "), (1, "Good"), (0, "wörld"), (1, "bye")]
        assert len(stream.completion.choices) == 2
        async with client.stream("hi", n=2) as stream:
            with pytest.raises(OutriderError, match=r"iterate over events\(\)"):
                _ = [text async for text in stream]


async def test_a_choice_that_never_ended_is_an_error() -> None:
    async with connected(Choosing(forget_choice=1)) as client:
        with pytest.raises(Unavailable, match="ended the stream before the answer did"):
            await client.generate("hi", n=2)
        assert (await client.generate("hi", n=1)).text == "Hello wörld"


async def test_log_probabilities_stand_beside_each_token() -> None:
    async with connected() as client:
        async with client.stream("hi", logprobs=1, prompt_logprobs=1) as stream:
            entries = [entry for delta in [d async for d in stream.events()] for entry in delta.logprobs]
        answer = stream.completion
        assert (await client.generate("hi")).logprobs is None
    top = (TopLogprob(9, "t9", -0.5),)
    assert answer.logprobs == (TokenLogprob(0, "t0", -1.5, 2, top), TokenLogprob(1, "t1", -1.5, 2, top))
    assert list(answer.logprobs) == entries
    assert answer.prompt_logprobs == (
        TokenLogprob(5, "t5", None, None),
        TokenLogprob(6, "t6", -math.inf, 900, top),
    )
    facts = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    shown = {"token_id": 9, "token": "t9", "logprob": -0.5}
    assert facts["logprobs"][1] == {"token_id": 1, "token": "t1", "logprob": -1.5, "rank": 2, "top": [shown]}
    assert facts["prompt_logprobs"] == [
        {"token_id": 5, "token": "t5", "logprob": None, "rank": None, "top": []},
        {"token_id": 6, "token": "t6", "logprob": None, "rank": 900, "top": [shown]},
    ]


async def test_echo_starts_the_texts_and_stands_apart_in_the_answer() -> None:
    async with connected() as client:
        async with client.stream("Say: ", echo=True) as stream:
            assert [text async for text in stream] == ["Say: ", "Hello ", "wörld"]
        answer = stream.completion
        assert (answer.prompt_text, answer.text) == ("Say: ", "Hello wörld")
        assert answer.to_dict()["prompt"] == "Say: "
        silent = await client.generate("Say: ", prompt_logprobs=0)
        assert silent.prompt_text is None
        assert "prompt" not in silent.to_dict()


def test_the_synchronous_client_does_the_same() -> None:
    ready, stop = threading.Event(), threading.Event()
    address = ""

    def run() -> None:
        async def serve() -> None:
            nonlocal address
            async with connected() as client:
                address = client.address
                ready.set()
                await asyncio.to_thread(stop.wait)

        asyncio.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        with Client(address, timeout=60) as client:
            assert [choice.text for choice in client.generate("hi", n=2).choices] == ["Hello wörld", "Goodbye"]
            assert list(client.stream("Say: ", echo=True)) == ["Say: ", "Hello ", "wörld"]
            assert [delta.choice for delta in client.stream("hi", n=2).events()] == [0, 1, 0, 1]
            with pytest.raises(OutriderError, match=r"events\(\)"):
                list(client.stream("hi", n=2))
    finally:
        stop.set()
        thread.join(10)

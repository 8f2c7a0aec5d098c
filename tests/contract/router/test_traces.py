"""The spans of a router, at a real collector. What ranks and drafts add is seen in tests/e2e/test_traces.py."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from outrider.core.logs import Process
from outrider.core.sampling import Sampling, Verifier
from outrider.core.tracing import TraceSettings, Tracing, connect
from outrider.router.requests import NewRequest
from outrider.router.server import RouterServer
from outrider.router.submission import submit_from_wire, submit_to_wire
from outrider.router.tokenizer import TextTokenizer
from outrider.testing import ToyModel
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider_collector import CollectedSpan, Collector, faults_of

PROMPT = "Once upon"
NUM_TOKENS = 12


@pytest.fixture
def collector() -> Any:
    with Collector() as running:
        yield running


@pytest.fixture
async def tracing(collector: Collector) -> AsyncIterator[Tracing]:
    """Of a process that samples what its clients sample, and nothing else."""
    made = connect(TraceSettings(collector.endpoint, sample_ratio=0.0), Process("router", "router-0", "demo"))
    yield made
    await asyncio.to_thread(made.close)


def client_trace(sampled: bool = True) -> tuple[str, str, str]:
    """A client's traceparent, and the ids in it."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}", trace_id, span_id


async def ask(server: RouterServer, traceparent: str | None, **fields: Any) -> list[Any]:
    request = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, **fields)
    request.sampling.temperature = 0.0
    metadata = (("traceparent", traceparent),) if traceparent is not None else ()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata, timeout=60)
        return [response async for response in call]


async def spans_of(tracing: Tracing, collector: Collector, trace_id: str | None = None) -> list[CollectedSpan]:
    """All of them: what waits is sent first."""
    await asyncio.to_thread(tracing._provider.force_flush)
    return collector.spans(trace_id)


def test_the_checker_sees_what_is_planted() -> None:
    def span(name: str, own: str, parent: str, base_len: int | None = None, end: int = 2) -> CollectedSpan:
        attributes = {} if base_len is None else {"outrider.base_len": base_len}
        return CollectedSpan(name, "t", own, parent, 1, end, False, "s", "i", attributes)

    sound = [
        span("request", "a", "client"),
        span("round", "b", "a", 5),
        span("propose", "c", "b", 5),
        span("verify", "d", "b"),
        span("commit", "e", "b", 5),
    ]
    assert faults_of(sound, "client") == []
    planted = {
        "is not a child of its client's span": span("request", "a", "other"),
        "has None for a parent": span("verify", "d", "gone"),
        "has request for a parent": span("verify", "d", "a"),
        "continues 4 tokens in a round that continues 5": span("propose", "c", "b", 4),
        "ends before it begins": span("verify", "d", "b", end=0),
    }
    for words, wrong in planted.items():
        [fault] = faults_of([wrong if one.span_id == wrong.span_id else one for one in sound], "client")
        assert words in fault


@pytest.mark.parametrize("plan_ahead", [False, True])
async def test_a_traced_request_is_rounds_that_follow_each_other(
    world: Any, collector: Collector, tracing: Tracing, plan_ahead: bool
) -> None:
    target, draft = await world.target(), await world.draft(wrong_every=3)
    server = await world.router(tracing=tracing, router={"plan_ahead": plan_ahead})
    await world.drafts_ready(server)
    traceparent, trace_id, span_id = client_trace()
    await ask(server, traceparent, request_id="traced")
    spans = await spans_of(tracing, collector, trace_id)
    assert faults_of(spans, span_id) == []
    [request] = [span for span in spans if span.name == "request"]
    rounds = [span for span in spans if span.name == "round"]
    commits = [span for span in spans if span.name == "commit"]
    assert request.attributes["gen_ai.request.id"] == "traced"
    assert request.attributes["gen_ai.usage.completion_tokens"] == NUM_TOKENS
    assert request.attributes["gen_ai.usage.prompt_tokens"] == len(PROMPT)
    assert request.attributes["outrider.finish_reason"] == "length"
    assert sum(span.attributes["outrider.num_committed_tokens"] for span in rounds) == NUM_TOKENS
    assert [span.attributes["outrider.round"] for span in rounds] == list(range(1, len(rounds) + 1))
    assert {commit.parent_id for commit in commits} == {span.span_id for span in rounds}
    assert len(commits) == len(rounds)
    assert all(span.start >= request.start and span.end <= request.end + 1e9 for span in rounds)
    assert (target.faults, draft.faults) == ([], [])


async def test_each_choice_has_rounds_of_its_own(world: Any, collector: Collector, tracing: Tracing) -> None:
    await world.target()
    server = await world.router(tracing=tracing)
    traceparent, trace_id, span_id = client_trace()
    request = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=3, ignore_eos=True, n=2)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for _ in stub.Generate(request, metadata=(("traceparent", traceparent),), timeout=60):
            pass
    spans = await spans_of(tracing, collector, trace_id)
    assert faults_of(spans, span_id) == []
    tokens = {0: 0, 1: 0}
    for span in spans:
        if span.name == "round":
            tokens[span.attributes["outrider.choice"]] += span.attributes["outrider.num_committed_tokens"]
    assert tokens == {0: 3, 1: 3}


async def test_a_trace_comes_by_http_too(world: Any, collector: Collector, tracing: Tracing) -> None:
    await world.target()
    server = await world.router(tracing=tracing)
    traceparent, trace_id, span_id = client_trace()
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{server.http_url}/completions", json=body, headers={"traceparent": traceparent})
    assert answer.status_code == 200, answer.text
    spans = await spans_of(tracing, collector, trace_id)
    assert faults_of(spans, span_id) == []
    assert {span.name for span in spans} == {"request", "round", "commit"}


def test_a_trace_reaches_the_owner_of_the_group(model_folder: Path) -> None:
    """Which may be another router than the one that the client speaks to."""
    sampling = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
    traceparent = client_trace()[0]
    request = NewRequest("r", 0, (1, 2), sampling, max_tokens=3, traceparent=traceparent)
    message = submit_to_wire(request, 0.0)
    assert submit_from_wire(message, TextTokenizer(model_folder), 0.0).traceparent == traceparent
    message.traceparent = "x" * 10_000
    assert len(submit_from_wire(message, TextTokenizer(model_folder), 0.0).traceparent) == len(traceparent)


async def test_what_no_client_samples_leaves_no_trace_anywhere(
    world: Any, collector: Collector, tracing: Tracing
) -> None:
    await world.target()
    plans: list[Any] = []
    server = await world.router(tracing=tracing)
    sent = server.group.target.stream.send  # type: ignore[union-attr]
    server.group.target.stream.send = lambda plan, *rest: (plans.append(plan), sent(plan, *rest))[1]  # type: ignore
    await ask(server, None)
    await ask(server, client_trace(sampled=False)[0])
    await ask(server, "00-nonsense")
    assert await spans_of(tracing, collector) == []
    assert plans
    assert all(plan.traces == () for plan in plans)
    await ask(server, client_trace()[0])
    assert any(plan.traces for plan in plans)  # the one that is sampled is seen


async def test_what_ends_a_request_is_told(world: Any, collector: Collector, tracing: Tracing) -> None:
    target = await world.target()
    server = await world.router(tracing=tracing, times=world.patient)
    refused, refused_id, _ = client_trace()
    with pytest.raises(grpc.aio.AioRpcError, match="xyzzy"):
        await ask(server, refused, stop=["xyzzy" * 60])
    aborted, aborted_id, span_id = client_trace()
    request = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=300, ignore_eos=True)
    target.pause(after=2)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(request, metadata=(("traceparent", aborted),), timeout=60)
        async for response in call:
            if response.WhichOneof("event") == "delta":
                break
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.code()
    await world.until(lambda: server.group.num_unfinished == 0, "the request ends")
    target.resume()
    [span] = await spans_of(tracing, collector, refused_id)
    assert (span.name, span.failed, span.attributes["outrider.finish_reason"]) == ("request", True, "InvalidRequest")
    assert span.status == "InvalidRequest: stop[0]"  # and nothing that the client sent

    async def ended() -> bool:
        spans = await spans_of(tracing, collector, aborted_id)
        return any(span.name == "request" for span in spans)

    await world.until(ended, "the request's span comes")
    spans = await spans_of(tracing, collector, aborted_id)
    assert faults_of(spans, span_id) == []
    [whole] = [span for span in spans if span.name == "request"]
    assert (whole.failed, whole.attributes["outrider.finish_reason"]) == (False, "cancelled")
    last = [span for span in spans if span.name == "round"][-1]
    assert last.attributes["outrider.finish_reason"] == "abort"


async def test_a_collector_that_is_gone_costs_spans_and_nothing_else(world: Any) -> None:
    with Collector() as gone:
        endpoint = gone.endpoint
    tracing = connect(TraceSettings(endpoint, sample_ratio=1.0), Process("router", "router-0", "demo"))
    await world.target()
    server = await world.router(tracing=tracing)
    responses = await ask(server, None)
    tokens = [token for response in responses for token in response.delta.token_ids]
    assert tokens == ToyModel().output(list(PROMPT.encode()), NUM_TOKENS)
    async with asyncio.timeout(30):
        await asyncio.to_thread(tracing.close, 0.5)

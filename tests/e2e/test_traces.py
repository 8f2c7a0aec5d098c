"""Traces and logs of a whole cluster: one request, one trace with the spans of every process, lines that are found."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from typing import Any

import grpc
import pytest

from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider_collector import CollectedSpan, Collector, faults_of

NUM_TOKENS = 24
CORE_OF_GRPC = re.compile(r"[IWEF]\d{4} ")  # it writes past every logger
SECRET_PROMPT = "The secret word is xyzzy"


@pytest.fixture
def traced(running_cluster: Any) -> tuple[str, str]:
    """A request that its client samples. Returns the ids of its trace and of the client's span."""
    running_cluster.wait_until_whole()
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    request = generation_pb2.GenerateRequest(
        text=SECRET_PROMPT, request_id=f"traced-{trace_id[:8]}", max_tokens=NUM_TOKENS, ignore_eos=True
    )
    request.sampling.temperature = 0.0
    metadata = (("traceparent", f"00-{trace_id}-{span_id}-01"),)
    with grpc.insecure_channel(running_cluster.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        responses = list(stub.Generate(request, metadata=metadata, timeout=120))
    assert responses[-1].finished.completion_tokens == NUM_TOKENS
    return trace_id, span_id


def is_whole(spans: list[CollectedSpan]) -> bool:
    """Whether everything that a request of so many tokens must leave is there: processes send apart from each other."""
    rounds = [span for span in spans if span.name == "round"]
    committed = sum(span.attributes.get("outrider.num_committed_tokens", 0) for span in rounds)
    verified = Counter((span.parent_id, span.instance) for span in spans if span.name == "verify")
    return (
        any(span.name == "request" for span in spans)
        and committed == NUM_TOKENS
        and all(verified[span.span_id, rank] for span in rounds for rank in ("0", "1"))
        and any(span.name == "propose" for span in spans)
    )


def test_one_request_is_one_trace_of_all_processes(
    running_cluster: Any, collector: Collector, traced: tuple[str, str]
) -> None:
    trace_id, span_id = traced
    spans = collector.wait_for(trace_id, is_whole)
    assert faults_of(spans, span_id) == []
    processes = {(span.service, span.instance) for span in spans}
    assert processes == {
        ("outrider-router", "router-0"),
        ("outrider-target", "0"),
        ("outrider-target", "1"),
        *(("outrider-draft", draft["draft_id"]) for draft in running_cluster.status()["drafts"]),
    }
    verified = [span for span in spans if span.name == "verify"]
    epoch = running_cluster.status()["groups"][0]["epoch"]
    assert {span.attributes["outrider.epoch"] for span in verified} == {epoch}
    rounds = {span.span_id: span for span in spans if span.name == "round"}
    for span in verified:
        if span.instance == "0" and "outrider.num_accepted_tokens" in span.attributes:
            own = rounds[span.parent_id].attributes
            assert span.attributes["outrider.num_draft_tokens"] in (0, own["outrider.num_draft_tokens"])
    assert any(span.attributes["outrider.num_draft_tokens"] for span in verified)


def test_a_request_that_nobody_samples_leaves_no_span(
    running_cluster: Any, collector: Collector, traced: tuple[str, str]
) -> None:
    answer = running_cluster.generate("def f(", "--max-tokens", "8")
    collector.wait_for(traced[0], is_whole)
    requests = {span.attributes["gen_ai.request.id"] for span in collector.spans() if span.name == "request"}
    assert answer["request_id"] not in requests
    assert f"traced-{traced[0][:8]}" in requests


def test_every_line_of_the_logs_is_an_object_that_says_who_and_what(
    running_cluster: Any, traced: tuple[str, str]
) -> None:
    running_cluster.wait_until_whole()

    def written() -> list[dict[str, Any]]:
        lines = []
        for name in ("supervisor.log", "router.log"):
            text = (running_cluster.state_folder / name).read_text()
            lines += text[: text.rfind("\n") + 1].splitlines()
        return [json.loads(line) for line in lines if not CORE_OF_GRPC.match(line)]

    def found(request_id: str) -> list[dict[str, Any]]:
        return [entry for entry in written() if entry.get("request_id") == request_id and "status" in entry]

    [access] = running_cluster.wait_for(lambda: found(f"traced-{traced[0][:8]}"), "the line of the call")
    assert (access["role"], access["id"], access["status"]) == ("router", "router-0", "OK")
    assert (access["completion_tokens"], access["outcome"]) == (NUM_TOKENS, "length")
    assert access["epoch"] >= 1
    for role in ("supervisor", "router", "target", "draft"):
        entries = [entry for entry in written() if entry.get("role") == role]
        assert entries, f"no line of a {role}"
        assert all({"ts", "level", "logger", "message", "id"} <= entry.keys() for entry in entries)
    assert all("epoch" in entry for entry in written() if entry.get("role") == "target")
    assert SECRET_PROMPT not in json.dumps(written())

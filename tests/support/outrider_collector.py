"""A collector of spans: OpenTelemetry's own service behind a real socket, which keeps what comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class CollectedSpan:
    """Ids in hexadecimal, times in nanoseconds. ``service`` and ``instance`` name the process."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    failed: bool
    service: str
    instance: str
    attributes: dict[str, Any]
    status: str = ""  # what is said of a failure


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Use it as a context manager."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait(10)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        spans = [
            _collected(span, _attributes(resource.resource.attributes))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace_id: str | None = None) -> list[CollectedSpan]:
        """What has come so far, in the order of their beginnings."""
        with self._lock:
            chosen = [span for span in self._spans if trace_id in (None, span.trace_id)]
        return sorted(chosen, key=lambda span: span.start)

    def wait_for(
        self, trace_id: str, is_whole: Callable[[list[CollectedSpan]], bool], timeout_s: float = 60.0
    ) -> list[CollectedSpan]:
        """The spans of a trace once they are whole. Not within an event loop."""
        deadline = time.monotonic() + timeout_s
        while not is_whole(spans := self.spans(trace_id)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s; so far {[span.name for span in spans]}")
            time.sleep(0.05)
        return spans


def faults_of(spans: list[CollectedSpan], client_span_id: str) -> list[str]:
    """What is wrong with one request's trace: whose parent is not what it should be, or who lies outside of it."""
    by_id = {span.span_id: span for span in spans}
    parents = {"request": None, "round": "request", "propose": "round", "verify": "round", "commit": "round"}
    faults = []
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parents[span.name] is None:
            if span.parent_id != client_span_id:
                faults.append(f"{span.name} is not a child of its client's span")
        elif parent is None or parent.name != parents[span.name]:
            faults.append(f"{span.name} of {span.service} {span.instance} has {parent and parent.name} for a parent")
        elif span.name in ("propose", "commit") and _base(span) != _base(parent):
            faults.append(f"{span.name} continues {_base(span)} tokens in a round that continues {_base(parent)}")
        if span.end < span.start:
            faults.append(f"{span.name} ends before it begins")
    return faults


def _base(span: CollectedSpan) -> Any:
    """Length of the text that it continues; None for a round that was not finished."""
    return span.attributes.get("outrider.base_len")


def _collected(span: Any, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        service=str(resource.get("service.name")),
        instance=str(resource.get("service.instance.id")),
        attributes=_attributes(span.attributes),
        status=span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}

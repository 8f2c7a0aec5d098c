"""Spans of OpenTelemetry, for rooms that need not know it: it is imported where spans are wanted, and only there.

A trace goes from process to process as W3C's ``traceparent``. Requests that are not sampled have none, and nothing is
done or sent for them; a process without a ``Tracing`` traces nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from outrider.core.errors import ConfigError
from outrider.core.logs import Process

log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CLOSE_TIMEOUT_S = 3.0  # for the last spans to reach the collector
MAX_ATTRIBUTE_LENGTH = 256

Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class TraceSettings:
    """Where spans go, and how many.

    Attributes:
        endpoint: of a collector; empty where the standard variables name it.
        sample_ratio: share of the requests that are traced where their client's trace does not decide it.
    """

    endpoint: str = ""
    sample_ratio: float = 1.0


class Span:
    """One that was begun. It is of use once ``end`` was called.

    Attributes:
        traceparent: names it as the parent of others.
    """

    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, why: str) -> None:
        """What the span is about went wrong."""
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, why[:MAX_ATTRIBUTE_LENGTH])

    def end(self, end_ns: int | None = None) -> None:
        """``end_ns``: when it ended, by ``time.time_ns``; now where that is not said."""
        self._span.end(end_ns)


class Tracing:
    """Makes spans, which go to a collector from a thread of their own. Safe to use from any thread."""

    def __init__(self, provider: Any) -> None:
        """``provider`` is a ``TracerProvider`` of OpenTelemetry."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("outrider")
        self._propagator = TraceContextTextMapPropagator()
        self._no_context = Context()  # ours come from messages, never from the task at hand
        self._kinds = {False: SpanKind.INTERNAL, True: SpanKind.SERVER}

    def begin(
        self,
        name: str,
        parent: Mapping[str, str] | str,
        attributes: Attributes | None = None,
        *,
        start_ns: int | None = None,
        is_server: bool = False,
    ) -> Span | None:
        """A span that begins now, or began at ``start_ns``; None where its trace is not sampled.

        Args:
            parent: a ``traceparent``, or the headers of a request, which may hold none: then a trace begins here.
        """
        carrier = {"traceparent": parent} if isinstance(parent, str) else parent
        context = self._propagator.extract(carrier, context=self._no_context)
        span = self._tracer.start_span(
            name, context=context, kind=self._kinds[is_server], attributes=attributes, start_time=start_ns
        )
        return Span(span) if span.is_recording() else None

    def record(self, name: str, parent: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """A span that is over already."""
        span = self.begin(name, parent, attributes, start_ns=start_ns)
        if span is not None:
            span.end(end_ns)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is there. A collector that does not take it holds nobody up for longer than ``timeout_s``."""
        thread = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("the collector did not take the last spans within %g s", timeout_s)


def settings_with(endpoint: str | None, sample_ratio: float, environment: Mapping[str, str]) -> TraceSettings | None:
    """Whether and how to trace; None for not at all. ``endpoint`` is the settings' own.

    Raises ``ConfigError`` where the settings want spans and OpenTelemetry is not installed. Variables are often set for
    whole clusters: if it is they that want them, a line of the log says what is missing.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    by_variable = any(environment.get(name) for name in ENDPOINT_VARIABLES)
    if endpoint is None and not by_variable:
        return None
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None or not _has_exporter():
        missing = "OpenTelemetry is not installed: pip install 'outrider[tracing]'"
        if endpoint is not None:
            raise ConfigError(f"tracing.otlp_endpoint is set, but {missing}")
        log.warning("no spans are sent, for %s", missing)
        return None
    if endpoint is None:
        protocol = next(filter(None, (environment.get(name) for name in PROTOCOL_VARIABLES)), "grpc")
        if protocol != "grpc":
            log.warning("no spans are sent: they go over gRPC only, and the environment asks for %s", protocol[:40])
            return None
    return TraceSettings(endpoint or "", sample_ratio)


def connect(settings: TraceSettings, process: Process) -> Tracing:
    """Spans of this process over OTLP. A collector that is not there costs lines in the log and spans, nothing else."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    names = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"outrider-{process.role}",
        "service.namespace": process.cluster,
        "service.instance.id": process.id,
    }
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource.create(names),
        span_limits=SpanLimits(max_attribute_length=MAX_ATTRIBUTE_LENGTH),
        shutdown_on_exit=False,  # it would wait for a collector that is gone
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint or None)))
    return Tracing(provider)


def _has_exporter() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:
        return False

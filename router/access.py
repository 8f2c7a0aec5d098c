"""One line of the log for each call of a client, by whichever door: who asked, what came of it, how long it took.

What is known of a call is collected in a ``Call`` that goes with its task. Nothing of what was sent is in it: no
text, no tokens, no keys.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.core.logs import bind
from outrider.router.keys import refuse

log = logging.getLogger(__name__)

OWN_SERVICES = "/outrider.v1."
CLIENTS_METHODS = "/outrider.v1.GenerationService/"  # those that are worth a line at INFO
TRACE_HEADERS = ("traceparent", "tracestate")
CLIENT_GONE = "CANCELLED"
MAX_SHOWN = 200  # characters of a path or a method


@dataclass
class Call:
    """One call. Times are seconds on the monotonic clock.

    Attributes:
        request_id: of the first request that it made to the frontend; a call over HTTP may make several.
        outcome: why its text ended, or what ended it.
        trace_headers: the client's trace, if it named one.
    """

    protocol: str
    method: str
    peer: str
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    request_id: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_at: float | None = None
    outcome: str = ""

    def line(self, status: str, now: float) -> tuple[str, dict[str, Any]]:
        """The message, and the fields of a log in JSON."""
        fields: dict[str, Any] = {
            "protocol": self.protocol,
            "method": self.method,
            "status": status,
            "peer": self.peer,
            "duration_ms": round(1e3 * (now - self.started), 3),
        }
        words = f"{self.protocol} {self.method} {status}"
        if self.request_id:
            fields |= {
                "request_id": self.request_id,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "outcome": self.outcome,
            }
            words += f" request {self.request_id}: {self.prompt_tokens} + {self.completion_tokens} tokens"
            words += f", {self.outcome}" if self.outcome else ""
        if self.first_token_at is not None:
            fields["ttft_ms"] = round(1e3 * (self.first_token_at - self.started), 3)
            words += f", first after {fields['ttft_ms']:.1f} ms"
        return f"{words}, {fields['duration_ms']:.1f} ms, from {self.peer}", fields


_current: ContextVar[Call | None] = ContextVar("call", default=None)


def current_call() -> Call | None:
    """The call that the current task answers."""
    return _current.get()


@contextlib.contextmanager
def call_of_task(call: Call, level: int, status: Callable[[], str]) -> Iterator[None]:
    """The current task answers ``call`` within; then the line is written, with what ``status`` says by then."""
    _current.set(call)
    try:
        yield
    finally:
        if log.isEnabledFor(level):
            message, fields = call.line(status(), time.monotonic())
            log.log(level, "%s", message, extra=fields)
        _current.set(None)


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """For a gRPC server; the first of its interceptors, so that calls that others refuse are seen too."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        is_refused = handler is not None and handler.stream_stream is refuse  # for its key, whatever it calls
        if not is_refused and (handler is None or handler.request_streaming or not method.startswith(OWN_SERVICES)):
            return handler
        metadata = {key: str(value) for key, value in handler_call_details.invocation_metadata or ()}
        headers = {name: metadata[name] for name in TRACE_HEADERS if name in metadata}
        level = logging.INFO if is_refused or method.startswith(CLIENTS_METHODS) else logging.DEBUG
        name = _shown(method.removeprefix(OWN_SERVICES))
        if is_refused:
            return handler._replace(stream_stream=_streaming(handler.stream_stream, name, headers, level))
        if handler.response_streaming:
            return handler._replace(unary_stream=_streaming(handler.unary_stream, name, headers, level))
        return handler._replace(unary_unary=_answering(handler.unary_unary, name, headers, level))


def _answering(behaviour: Any, method: str, headers: Mapping[str, str], level: int) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        status = _Status(context)
        call = Call("gRPC", method, context.peer(), headers)
        with call_of_task(call, level, status.name), status:
            return await behaviour(request, context)

    return answer


def _streaming(behaviour: Any, method: str, headers: Mapping[str, str], level: int) -> Any:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        status = _Status(context)
        call = Call("gRPC", method, context.peer(), headers)
        with call_of_task(call, level, status.name), status:
            responses = behaviour(request, context)
            if not hasattr(responses, "__aiter__"):  # a coroutine that writes by itself
                await responses
                return
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response

    return answer


class _Status:
    """How a gRPC call ends: what its context says, or what its behaviour raised."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._raised: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._raised = error

    def name(self) -> str:
        code = self._context.code()
        if isinstance(self._raised, Exception) and not code:
            return grpc.StatusCode.UNKNOWN.name
        if self._raised is not None and not isinstance(self._raised, Exception):
            return CLIENT_GONE
        number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
        return next((known.name for known in grpc.StatusCode if known.value[0] == number), str(number))


class AccessLog:
    """For an ASGI application: the outermost layer of it."""

    QUIET = frozenset({"/health", "/ping", "/ready", "/load", "/version", "/metrics", "/livez", "/readyz"})

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        named = {name.encode(): name for name in TRACE_HEADERS}
        headers = {named[key]: value.decode("latin-1") for key, value in scope["headers"] if key in named}
        host, port = scope.get("client") or ("unknown", 0)
        path = _shown(scope["path"])
        level = logging.DEBUG if path in self.QUIET else logging.INFO
        call = Call("HTTP", f"{scope['method']} {path}", f"{host}:{port}", headers)
        # 499: nginx's name for a client that went away before it was answered.
        with call_of_task(call, level, lambda: str(status or 499)):
            await self._app(scope, receive, noted)


def _shown(name: str) -> str:
    """A name that a client chose, as a part of one line."""
    return name[:MAX_SHOWN].encode("unicode_escape").decode()


def bind_request(request_id: str) -> None:
    """The current task answers a request to the frontend from now on."""
    bind(request_id=request_id)
    call = _current.get()
    if call is not None and not call.request_id:
        call.request_id = request_id

"""The routes: OpenAI's, and those by which users of vLLM look whether a server lives."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider import __version__
from outrider.core.errors import InvalidRequest, OutriderError
from outrider.metrics.declared import CONTENT_TYPE
from outrider.router.frontend import LONG_TEXT, Frontend
from outrider.router.http.answers import AnswerSettings, ChatAnswer, CompletionAnswer
from outrider.router.http.errors import HttpError, fault_in_the_server, http_error, shape_error
from outrider.router.http.exchange import Exchange, error_response
from outrider.router.http.fields import ChatRequest, CommonRequest, CompletionRequest, StreamOptions
from outrider.router.http.tools import tool_parser, wanted_functions
from outrider.router.http.translate import translate_chat, translate_completion
from outrider.router.keys import ApiKeys
from outrider.router.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20

MAX_ID_LENGTH = 100  # of a client's own id: with what is put before and behind it, it is one of the frontend's
HEADER_LENGTH = 64  # what of an id in a header is seen in the log
CLIENT_GONE = 499  # nginx's status for a client that went away before it was answered

AnyRequest = TypeVar("AnyRequest", bound=CommonRequest)


@dataclass(frozen=True)
class Served:
    """What is behind the routes.

    Attributes:
        names: of the model; answers carry the first.
        max_model_len: positions of the longest sequence, once known.
        state: "ready", or why not.
        is_alive: whether the engine answers, drain or no drain.
        tool_call_parser: as in the settings.
        with_metrics: whether answers tell what speculation did, where the request says nothing.
        keys: None lets everybody in.
        metrics: what Prometheus reads, who needs no key for it.
    """

    frontend: Frontend
    tokenizer: TextTokenizer
    names: tuple[str, ...]
    max_model_len: Callable[[], int | None]
    state: Callable[[], str]
    is_alive: Callable[[], bool]
    tool_call_parser: str = "hermes"
    with_metrics: bool = True
    keys: ApiKeys | None = None
    metrics: Callable[[], str] | None = None


@dataclass(frozen=True)
class Names:
    """Of one request.

    Attributes:
        answer: the answer's id.
        request: the id that the frontend gets, which no other request has.
        headers: of the answer.
    """

    answer: str
    request: str
    headers: dict[str, str]


def make_app(served: Served) -> ASGIApp:
    """The application. It keeps nothing of a request once that is answered."""
    routes = Routes(served)
    table = {
        ("POST", "/v1/chat/completions"): routes.chat,
        ("POST", "/v1/completions"): routes.completions,
        ("GET", "/v1/models"): routes.models,
        ("GET", "/v1/models/{name:path}"): routes.model,
        ("GET", "/health"): routes.health,
        ("GET", "/ready"): routes.ready,
        ("GET", "/version"): routes.version,
        ("GET", "/load"): routes.load,
        ("GET", "/metrics"): routes.metrics,
    }
    app: ASGIApp = Starlette(
        routes=[
            *(Route(path, endpoint, methods=[method]) for (method, path), endpoint in table.items()),
            Route("/ping", routes.health, methods=["GET", "POST"]),
        ],
        exception_handlers={
            HttpError: _own_error,
            HTTPException: _no_such_route,
            ClientDisconnect: _client_gone,
            Exception: _own_fault,
        },
    )
    if served.keys is not None:
        app = KeyCheck(app, served.keys)
    return LastResort(app, served.frontend)


class LastResort:
    """No fault leaves a client without an answer in OpenAI's shape, and while the router drains every connection ends
    with its answer: the next request of that client is to find another router.
    """

    def __init__(self, app: ASGIApp, frontend: Frontend) -> None:
        self._app = app
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start" and self._frontend.draining:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if scope["type"] != "http":
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not begun:  # Starlette has answered already where the fault was in a route
                await error_response(fault_in_the_server(error))(scope, receive, noted)


KEPT = ("/v1", "/metrics", "/load")  # starts of paths that want a key, where there are keys


class KeyCheck:
    """Lets only those with a key through to ``/v1`` and to figures about others' requests; whether the server is well
    is no secret.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(KEPT):
            given = dict(scope["headers"]).get(b"authorization", b"").decode("utf-8", "surrogateescape")
            if not self._keys.admit(given):
                message = "the request needs a valid key in the header 'Authorization: Bearer KEY'"
                error = HttpError(401, message, code="invalid_api_key")
                await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Routes:
    """One method for each route."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._since = int(time.time())

    async def chat(self, request: Request) -> Response:
        asked, size = await _read(request, ChatRequest)
        model, served = self._model(asked), self._served

        def translated() -> Any:
            with _refusals({"prompt": "messages", "chat": "messages"}):
                return translate_chat(asked, served.tokenizer), wanted_functions(asked)

        messages, functions = await asyncio.to_thread(translated) if size > LONG_TEXT else translated()
        names = _names(request, asked, "chatcmpl")
        settings = self._settings(asked, model, names.answer, bool(asked.logprobs))
        parsers = [tool_parser(asked, functions, served.tool_call_parser) for _ in range(settings.num_choices)]
        answer = ChatAnswer(settings, parsers)
        return Exchange(served.frontend, messages, answer, names.request, _stream(asked), names.headers)

    async def completions(self, request: Request) -> Response:
        asked, size = await _read(request, CompletionRequest)
        model = self._model(asked)
        with _refusals({}):
            translated = (
                await asyncio.to_thread(translate_completion, asked)
                if size > LONG_TEXT
                else translate_completion(asked)
            )
        names, num_prompts = _names(request, asked, "cmpl"), len(translated.requests)
        settings = self._settings(asked, model, names.answer, asked.logprobs is not None, num_prompts=num_prompts)
        answer = CompletionAnswer(settings)
        return Exchange(self._served.frontend, translated, answer, names.request, _stream(asked), names.headers)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._served.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._served.names:
            raise self._no_such_model(name)
        return JSONResponse(self._card(name))

    async def health(self, _: Request) -> Response:
        """As in vLLM 503 where the engine is dead: no target answers. That it drains is no illness."""
        return Response(status_code=200 if self._served.is_alive() else 503)

    async def ready(self, _: Request) -> Response:
        state = self._served.state()
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        if self._served.metrics is None:
            raise HTTPException(404)
        return PlainTextResponse(self._served.metrics(), media_type=CONTENT_TYPE)

    async def load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self._served.frontend.num_open})

    def _model(self, asked: CommonRequest) -> str:
        names = self._served.names
        if asked.model is not None and asked.model not in names:
            raise self._no_such_model(asked.model)
        return asked.model or names[0]

    def _no_such_model(self, name: str) -> HttpError:
        message = f"the model {name[:200]!r} is not served here; ask for one of {list(self._served.names)}"
        return HttpError(404, message, param="model", code="model_not_found")

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "outrider",
            "root": name,
            "parent": None,
            "max_model_len": self._served.max_model_len(),
        }

    def _settings(
        self, asked: CommonRequest, model: str, answer_id: str, with_logprobs: bool, *, num_prompts: int = 1
    ) -> AnswerSettings:
        if asked.stream and asked.prompt_logprobs is not None:
            raise HttpError(
                400, "prompt_logprobs must be absent with stream", param="prompt_logprobs", code="invalid_value"
            )
        if asked.stream_options is not None and not asked.stream:
            raise HttpError(
                400, "stream_options must be absent without stream", param="stream_options", code="invalid_value"
            )
        wish = asked.per_request_spec_decode_metrics
        return AnswerSettings(
            id=answer_id,
            model=model,
            num_prompts=num_prompts,
            num_choices=max(1, asked.n or 1),
            with_logprobs=with_logprobs,
            with_prompt_logprobs=asked.prompt_logprobs is not None,
            with_metrics=self._served.with_metrics if wish is None else wish != "none",
            with_usage=bool(asked.stream_options is not None and asked.stream_options.include_usage),
        )


class _refusals:  # noqa: N801 - used like a function
    """Within it, our exceptions become answers."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OutriderError):
            raise http_error(error, self._names) from error


async def _read(request: Request, kind: type[AnyRequest]) -> tuple[AnyRequest, int]:
    """The request, and how many bytes it had."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(413, f"the body must be at most {MAX_BODY_BYTES} bytes long", code="request_too_large")
    try:
        if len(body) > LONG_TEXT:
            return await asyncio.to_thread(kind.model_validate_json, bytes(body)), len(body)
        return kind.model_validate_json(bytes(body)), len(body)
    except ValidationError as error:
        raise shape_error(error, bytes(body)) from error


def _names(request: Request, asked: CommonRequest, prefix: str) -> Names:
    """A client may name a request, and that name is in use once. The header is no such name: proxies set it, and send
    the same one again when they try again.
    """
    header = request.headers.get("x-request-id", "")
    if asked.request_id:
        if len(asked.request_id) > MAX_ID_LENGTH or not asked.request_id.isprintable():
            limit = f"at most {MAX_ID_LENGTH} printable characters long"
            raise http_error(InvalidRequest("request_id", asked.request_id, limit), {})
        shown = unique = f"{prefix}-{asked.request_id}"
    elif header.isprintable() and header.isascii() and 0 < len(header) <= MAX_ID_LENGTH:
        shown, unique = f"{prefix}-{header}", f"{prefix}-{header[:HEADER_LENGTH]}-{uuid.uuid4().hex}"
    else:
        shown = unique = f"{prefix}-{uuid.uuid4().hex}"
    own = shown.removeprefix(f"{prefix}-")
    return Names(shown, unique, {"x-request-id": own} if own.isascii() else {})


def _stream(asked: CommonRequest) -> StreamOptions | None:
    return (asked.stream_options or StreamOptions()) if asked.stream else None


async def _own_error(_: Request, error: Exception) -> Response:
    return error_response(cast(HttpError, error))


async def _client_gone(_: Request, __: Exception) -> Response:
    """It left while it was still sending. Nobody reads this answer but the access log."""
    return Response(status_code=CLIENT_GONE)


async def _own_fault(_: Request, error: Exception) -> Response:
    return error_response(fault_in_the_server(error))


async def _no_such_route(request: Request, error: Exception) -> Response:
    refused = cast(HTTPException, error)
    message = f"{request.method} {request.url.path}: {refused.detail}"
    code = "not_found" if refused.status_code == 404 else "method_not_allowed"
    return error_response(HttpError(refused.status_code, message, code=code), refused.headers)

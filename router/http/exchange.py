"""One exchange: ask the frontend, and write the answer as one object or as server-sent events.

A client that goes away ends it: what was asked for is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider.core.errors import OutriderError
from outrider.router.frontend import Frontend
from outrider.router.http.answers import Answer
from outrider.router.http.errors import HttpError, fault_in_the_server, http_error
from outrider.router.http.fields import StreamOptions
from outrider.router.http.translate import Translated
from outrider.router.merge import merged
from outrider.v1 import generation_pb2

log = logging.getLogger(__name__)

Responses = AsyncGenerator[tuple[int, generation_pb2.GenerateResponse]]


class Exchange(Response):
    """The answer to a request that was translated. ``stream``: as events, with what its options say."""

    def __init__(
        self,
        frontend: Frontend,
        translated: Translated,
        answer: Answer,
        request_id: str,
        stream: StreamOptions | None,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._frontend = frontend
        self._translated = translated
        self._answer = answer
        self._request_id = request_id
        self._stream = stream
        self._extra = dict(headers)
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._guarded(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                log.info("request %s: the client went away", self._request_id)
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._respond(scope, receive, send)
        except HttpError as error:
            await self._fail(error, scope, receive, send)
        except Exception as error:
            log.exception("request %s failed", self._request_id)
            await self._fail(fault_in_the_server(error), scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._responses()) as responses:
            if self._stream is None:
                async for prompt, response in responses:
                    for _ in self._answer.take(prompt, response):
                        pass
                await JSONResponse(self._answer.body(), headers=self._extra)(scope, receive, send)
                return
            waiting = set(range(len(self._translated.requests)))
            early: list[tuple[int, generation_pb2.GenerateResponse]] = []
            async for prompt, response in responses:
                waiting.discard(prompt)  # each prompt's first response says that it was taken in
                early.append((prompt, response))
                if not waiting:
                    await self._tell(early, send)
                    early.clear()
        if self._stream.include_usage:
            await _send_event(send, self._answer.usage_chunk())
        await _send_end(send)

    async def _tell(self, responses: Sequence[tuple[int, generation_pb2.GenerateResponse]], send: Send) -> None:
        await self._begin(send)  # what is refused at the door has raised by now
        options = self._stream
        each = options is not None and bool(options.include_usage and options.continuous_usage_stats)
        for prompt, response in responses:
            for delta in self._answer.take(prompt, response):
                await _send_event(send, self._answer.chunk(delta, with_usage=each))

    async def _begin(self, send: Send) -> None:
        if self._begun:
            return
        self._begun = True
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # proxies of the nginx kind would hold events back
            **self._extra,
        }
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        for chunk in self._answer.first_chunks():
            await _send_event(send, chunk)

    async def _fail(self, error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
        log.info("request %s: %d: %s", self._request_id, error.status, error.for_log or error.code)
        if self._begun:
            await _send_event(send, error.body)
            await _send_end(send)
        else:
            await error_response(error, self._extra)(scope, receive, send)

    def _responses(self) -> Responses:
        requests = self._translated.requests
        return merged([self._ask(number, request) for number, request in enumerate(requests)])

    async def _ask(
        self, number: int, request: generation_pb2.GenerateRequest
    ) -> AsyncGenerator[generation_pb2.GenerateResponse]:
        own_id = self._request_id
        request.request_id = own_id if len(self._translated.requests) == 1 else f"{own_id}-{number}"
        try:
            async with contextlib.aclosing(self._frontend.generate(request, request.request_id)) as responses:
                async for response in responses:
                    yield response
        except OutriderError as error:
            names = {**self._translated.names, **self._translated.prompt_names[number]}
            raise http_error(error, names) from error


def error_response(error: HttpError, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error.body, error.status, headers={**(headers or {}), **error.headers})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_event(send: Send, data: dict[str, Any]) -> None:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    body = f"data: {text}\n\n".encode("utf-8", "replace")
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

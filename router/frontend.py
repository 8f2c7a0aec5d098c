"""The API that applications call: requests in, text out."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.core.errors import DeadlineExceeded, GenerationFailed, Unavailable
from outrider.core.errors_wire import errors_as_status
from outrider.router.admission import Defaults, admit
from outrider.router.group_service import GroupOwner
from outrider.router.requests import NewRequest
from outrider.router.text import TextStream
from outrider.router.tokenizer import TextTokenizer
from outrider.router.transcript import Update
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, group_pb2

log = logging.getLogger(__name__)

LONG_TEXT = 10_000  # characters from which on a prompt is tokenized beside the event loop


class Frontend(generation_pb2_grpc.GenerationServiceServicer):
    """Answers Generate and Abort for one group.

    Attributes:
        defaults: what requests take where they say nothing; replaced while the server runs.
        draining: while set, new requests are refused and running ones go on.
        num_open: requests that are being answered.
    """

    def __init__(
        self, owner: GroupOwner, tokenizer: TextTokenizer, defaults: Defaults, *, default_timeout_s: float
    ) -> None:
        self.defaults = defaults
        self.draining = False
        self.num_open = 0
        self._owner = owner
        self._tokenizer = tokenizer
        self._default_timeout_s = default_timeout_s

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        request_id = request.request_id or uuid.uuid4().hex
        self.num_open += 1
        try:
            async with errors_as_status(context, log, f"request {request_id}"):
                if self.draining:
                    raise Unavailable("the router is shutting down; send the request again")
                admitted = await self._admit(request, request_id, context.time_remaining())
                async for response in self._answer(admitted):
                    yield response
        finally:
            self.num_open -= 1

    async def Abort(  # noqa: N802
        self,
        request: generation_pb2.GenerationServiceAbortRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generation_pb2.GenerationServiceAbortResponse:
        async with errors_as_status(context, log, f"abort {request.request_id}"):
            found = await self._owner.abort(request.request_id, "aborted by the client")
            return generation_pb2.GenerationServiceAbortResponse(found=found)

    async def _admit(
        self, request: generation_pb2.GenerateRequest, request_id: str, time_remaining: float | None
    ) -> NewRequest:
        timeout = self._default_timeout_s if time_remaining is None else time_remaining
        info = self._owner.info

        def checked() -> NewRequest:
            return admit(
                request,
                request_id=request_id,
                tokenizer=self._tokenizer,
                max_model_len=info.max_model_len if info is not None else None,
                defaults=self.defaults,
                deadline=deadline,
            )

        deadline = time.monotonic() + timeout
        return await asyncio.to_thread(checked) if request.ByteSize() > LONG_TEXT else checked()

    async def _answer(self, request: NewRequest) -> AsyncIterator[generation_pb2.GenerateResponse]:
        start = await self._owner.submit(request)
        finished = False
        try:
            yield self._started(request, start)
            stream = TextStream(self._tokenizer.detokenizer(request.prompt_tokens), request.stop)
            silent = request.eos_token_ids | request.stop_token_ids  # they end a text and are no part of it
            num_tokens = 0
            async for update in self._owner.watch(request.request_id, start.position, start.generation):
                num_tokens += len(update.tokens)
                finished = update.finish is not None
                text = stream.feed([token for token in update.tokens if token not in silent])
                if finished:
                    text += stream.finish()
                if text or update.tokens:
                    delta = generation_pb2.Delta(text=text, token_ids=update.tokens)
                    yield _response(request, update, delta=delta)
                if update.finish is not None:
                    yield _response(request, update, finished=_finished(request, update.finish, num_tokens))
        finally:
            if not finished:
                # Cancelled, or the watch broke: nobody waits for the text any more.
                await self._owner.abort(request.request_id, "the client went away", start.generation)
                log.info("request %s: ended before its text did", request.request_id)

    def _started(self, request: NewRequest, start: Update) -> generation_pb2.GenerateResponse:
        info = self._owner.info
        started = generation_pb2.Started(
            seed=request.sampling.seed,
            verifier=int(request.sampling.verifier),  # type: ignore[arg-type]
            prompt_tokens=len(request.prompt_tokens),
            group_id=info.group_id if info is not None else "",
        )
        return _response(request, start, started=started)


def _response(request: NewRequest, update: Update, **event: Any) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        header=common_pb2.Header(epoch=update.epoch, generation=update.generation),
        request_id=request.request_id,
        **event,
    )


def _finished(request: NewRequest, finish: group_pb2.Finish, num_tokens: int) -> generation_pb2.Finished:
    if finish.reason == group_pb2.FINISH_REASON_ERROR:
        raise GenerationFailed(f"request {request.request_id} failed: {finish.error_message}")
    if finish.reason == group_pb2.FINISH_REASON_DEADLINE:
        raise DeadlineExceeded(f"request {request.request_id} ran out of time after {num_tokens} tokens")
    return generation_pb2.Finished(
        finish=finish, prompt_tokens=len(request.prompt_tokens), completion_tokens=num_tokens
    )

"""The API that applications call: requests in, text out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from outrider.core.errors import Unavailable
from outrider.core.errors_wire import errors_as_status
from outrider.core.tracing import Tracing
from outrider.router.admission import Admitted, admit
from outrider.router.answer import Answer
from outrider.router.grammar_door import GrammarDoor
from outrider.router.group_route import Owners
from outrider.router.group_service import GroupOwner
from outrider.router.limits import call_name, check_request_id, is_request_id
from outrider.router.merge import merged
from outrider.router.observed import Observed
from outrider.router.request_meter import RequestMeter, RequestTimer
from outrider.router.sampling_params import Defaults
from outrider.router.tokenizer import TextTokenizer
from outrider.router.transcript import Update
from outrider.v1 import generation_pb2, generation_pb2_grpc

log = logging.getLogger(__name__)

LONG_TEXT = 10_000  # characters from which on a prompt is tokenized beside the event loop
LONG_PROMPT = 1000  # tokens from which on its log-probabilities are spelt beside it too


class Frontend(generation_pb2_grpc.GenerationServiceServicer):
    """Answers Generate and Abort for one group.

    Attributes:
        defaults: what requests take where they say nothing; replaced while the server runs.
        draining: while set, new requests are refused and running ones go on.
        num_open: requests that are being answered.
        meter: what requests waited for and how they ended.
    """

    def __init__(
        self,
        owners: Owners,
        tokenizer: TextTokenizer,
        grammars: GrammarDoor,
        defaults: Defaults,
        *,
        default_timeout_s: float,
        tracing: Tracing | None = None,
    ) -> None:
        self.defaults = defaults
        self.draining = False
        self.num_open = 0
        self.meter = RequestMeter()
        self._owners = owners
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._default_timeout_s = default_timeout_s
        self._tracing = tracing

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        request_id = request.request_id
        if not request_id or not is_request_id(request_id):  # one that is refused must not be in any line of the log
            request_id = uuid.uuid4().hex
        asked = self.generate(request, request_id, context.time_remaining())
        async with errors_as_status(context, log, f"request {request_id}"), contextlib.aclosing(asked) as responses:
            async for response in responses:
                yield response

    async def generate(
        self, request: generation_pb2.GenerateRequest, request_id: str, timeout_s: float | None = None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse]:
        """What ``Generate`` answers, for callers in this process. Close it: where text is still to come, that aborts.

        ``request_id`` stands for the message's own, which may be empty. ``timeout_s`` of None takes the server's.

        Raises:
            InvalidRequest, Overloaded, Unavailable, Conflict: before the first response.
            GenerationFailed, DeadlineExceeded, Unavailable: later.
        """
        self.num_open += 1
        try:
            with Observed(request_id, self._tracing) as observed, self.meter.request() as timer:
                if self.draining:
                    raise Unavailable("the router is shutting down; send the request again")
                admitted = observed.admitted(await self._admit(request, request_id, timeout_s))
                async with contextlib.aclosing(self._answer(admitted, timer)) as responses:
                    async for response in responses:
                        observed.note(response)
                        yield response
        finally:
            self.num_open -= 1

    async def Abort(  # noqa: N802
        self,
        request: generation_pb2.GenerationServiceAbortRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generation_pb2.GenerationServiceAbortResponse:
        async with errors_as_status(context, log, call_name("abort", request.request_id)):
            check_request_id(request.request_id)
            found = await self._owners.abort(request.request_id, "aborted by the client")
            return generation_pb2.GenerationServiceAbortResponse(found=found)

    async def _admit(
        self, request: generation_pb2.GenerateRequest, request_id: str, time_remaining: float | None
    ) -> Admitted:
        timeout = self._default_timeout_s if time_remaining is None else time_remaining
        info = self._owners.info

        def checked() -> Admitted:
            return admit(
                request,
                request_id=request_id,
                tokenizer=self._tokenizer,
                check_grammar=self._grammars.check,
                max_model_len=info.max_model_len if info is not None else None,
                defaults=self.defaults,
                deadline=deadline,
            )

        deadline = time.monotonic() + timeout
        if request.sampling.HasField("grammar"):
            return await self._grammars.run(checked)
        return await asyncio.to_thread(checked) if request.ByteSize() > LONG_TEXT else checked()

    async def _answer(self, admitted: Admitted, timer: RequestTimer) -> AsyncGenerator[generation_pb2.GenerateResponse]:
        request, answer = admitted.request, Answer(admitted, self._tokenizer)
        timer.admitted(len(request.prompt_tokens), request.num_choices)
        owner, start = await self._owners.submit(request)
        try:
            info = owner.info
            for response in answer.begin(start, info.group_id if info is not None else ""):
                yield response
            async with contextlib.aclosing(self._updates(owner, request.request_id, start, answer)) as updates:
                async for choice, update in updates:
                    timer.took(choice, update)
                    taken = answer.take(choice, update)
                    if len(update.prompt_logprobs) > LONG_PROMPT:
                        taken = iter(await asyncio.to_thread(list, taken))
                    for response in taken:
                        yield response
        finally:
            if answer.open_choices:
                # Cancelled, or the watch broke: nobody waits for the text any more.
                log.info("request %s: ended before its text did", request.request_id)
                try:
                    await owner.abort(request.request_id, "the client went away", start.generation)
                except Unavailable as error:  # what nobody watches is aborted by its owner, if there is one still
                    log.info("request %s: %s", request.request_id, error)

    async def _updates(
        self, owner: GroupOwner, request_id: str, start: Update, answer: Answer
    ) -> AsyncGenerator[tuple[int, Update]]:
        """What the choices of a request commit, until the last of them has ended."""
        choices = sorted(answer.open_choices)
        watches = [owner.watch(request_id, start.position, start.generation, choice) for choice in choices]
        if answer.needs_prompt_logprobs:
            yield 0, await anext(watches[0])
        async with contextlib.aclosing(merged(watches)) as updates:
            async for item in updates:
                yield item

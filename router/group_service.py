"""Submit, watch and abort: what a frontend asks of the owner of a group, in the same process or over gRPC."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from outrider.core.errors import InvalidRequest
from outrider.core.errors_wire import error_from_rpc, errors_as_status
from outrider.core.plan import GroupInfo
from outrider.core.wire import logprobs_from_wire, logprobs_to_wire
from outrider.router.grammar_door import GrammarDoor
from outrider.router.requests import NewRequest
from outrider.router.streams import CHANNEL_OPTIONS
from outrider.router.submission import submit_from_wire, submit_to_wire
from outrider.router.tokenizer import TextTokenizer
from outrider.router.transcript import Update
from outrider.v1 import common_pb2, group_pb2, group_pb2_grpc

log = logging.getLogger(__name__)


class GroupOwner(Protocol):
    """What a frontend needs of a group: ``router.group.Group`` in this process or ``RemoteGroup`` in another one."""

    @property
    def info(self) -> GroupInfo | None: ...

    async def submit(self, request: NewRequest) -> Update: ...

    def watch(
        self, request_id: str, from_position: int, generation: int = 0, choice: int = 0
    ) -> AsyncIterator[Update]: ...

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool: ...


class GroupServicer(group_pb2_grpc.GroupServiceServicer):
    """Offers a group to frontends in other processes."""

    def __init__(self, owner: GroupOwner, tokenizer: TextTokenizer, grammars: GrammarDoor) -> None:
        self._owner = owner
        self._tokenizer = tokenizer
        self._grammars = grammars

    async def Submit(  # noqa: N802
        self, request: group_pb2.SubmitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.SubmitResponse:
        async with errors_as_status(context, log, f"submit {request.request_id}"):
            if not request.HasField("sampling"):
                raise InvalidRequest("sampling", None, "set")
            submitted = submit_from_wire(request, self._tokenizer, time.monotonic())
            grammar = submitted.sampling.grammar
            if grammar is not None:
                await self._grammars.run(lambda: self._grammars.check(grammar))
            start = await self._owner.submit(submitted)
            return group_pb2.SubmitResponse(
                header=common_pb2.Header(epoch=start.epoch, generation=start.generation),
                group_id=self._owner.info.group_id if self._owner.info is not None else "",
            )

    async def Watch(  # noqa: N802
        self, request: group_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[group_pb2.WatchResponse]:
        async with errors_as_status(context, log, f"watch {request.request_id}"):
            updates = self._owner.watch(
                request.request_id, request.from_position, request.header.generation, request.choice
            )
            async for update in updates:
                yield group_pb2.WatchResponse(
                    header=common_pb2.Header(epoch=update.epoch, generation=update.generation),
                    position=update.position,
                    tokens=update.tokens,
                    finish=update.finish,
                    logprobs=[logprobs_to_wire(entry) for entry in update.logprobs],
                    prompt_logprobs=[logprobs_to_wire(entry) for entry in update.prompt_logprobs],
                )

    async def Abort(  # noqa: N802
        self, request: group_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.AbortResponse:
        async with errors_as_status(context, log, f"abort {request.request_id}"):
            found = await self._owner.abort(request.request_id, request.reason, request.header.generation)
            return group_pb2.AbortResponse(header=request.header, found=found)


class RemoteGroup:
    """A group whose owner is another process. Close it with ``aclose``.

    ``info`` stays None: the owner checks what only it knows.
    """

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = group_pb2_grpc.GroupServiceStub(self._channel)

    @property
    def info(self) -> GroupInfo | None:
        return None

    async def submit(self, request: NewRequest) -> Update:
        """As ``Group.submit``; raises ``Unavailable`` if the owner does not answer in time."""
        try:
            response = await self._stub.Submit(submit_to_wire(request, time.monotonic()), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, address=self.address) from error
        return Update(response.header.epoch, response.header.generation, len(request.prompt_tokens), ())

    async def watch(
        self, request_id: str, from_position: int, generation: int = 0, choice: int = 0
    ) -> AsyncIterator[Update]:
        """As ``Group.watch``; a broken stream raises ``Unavailable``: watch again from the position reached."""
        call = self._stub.Watch(
            group_pb2.WatchRequest(
                header=common_pb2.Header(generation=generation),
                request_id=request_id,
                from_position=from_position,
                choice=choice,
            )
        )
        try:
            async for response in call:
                yield Update(
                    epoch=response.header.epoch,
                    generation=response.header.generation,
                    position=response.position,
                    tokens=tuple(response.tokens),
                    finish=response.finish if response.HasField("finish") else None,
                    logprobs=tuple(logprobs_from_wire(entry) for entry in response.logprobs),
                    prompt_logprobs=tuple(logprobs_from_wire(entry) for entry in response.prompt_logprobs),
                )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, address=self.address) from error
        finally:
            call.cancel()

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool:
        """As ``Group.abort``."""
        request = group_pb2.AbortRequest(
            header=common_pb2.Header(generation=generation), request_id=request_id, reason=reason
        )
        try:
            response = await self._stub.Abort(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, address=self.address) from error
        return bool(response.found)

    async def aclose(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            await self._channel.close(None)

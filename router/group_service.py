"""What frontends ask of the owner of a group, and the service by which those in other processes ask it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc

from outrider.core.errors import ConfigError, InvalidRequest
from outrider.core.errors_wire import errors_as_status
from outrider.core.keepalive import server_keepalive
from outrider.core.plan import GroupInfo
from outrider.core.wire import group_info_to_wire, logprobs_to_wire
from outrider.router.grammar_door import GrammarDoor
from outrider.router.limits import call_name, check_request_id
from outrider.router.remote_group import PING_MS, PING_TIMEOUT_MS
from outrider.router.requests import NewRequest
from outrider.router.streams import CHANNEL_OPTIONS
from outrider.router.submission import submit_from_wire
from outrider.router.tokenizer import TextTokenizer
from outrider.router.transcript import Update
from outrider.v1 import common_pb2, group_pb2, group_pb2_grpc

log = logging.getLogger(__name__)

UNWATCHED_S = 5.0  # how long a request goes on that nobody watches: its frontend died, or reconnects
LOOK_S = 0.05  # how often followers look whether something changed
# Frontends are asked whether they live as they ask themselves, and what they ask so often must be allowed them.
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    *server_keepalive(PING_MS, PING_TIMEOUT_MS, allowed_ms=PING_MS // 2),
    ("grpc.so_reuseport", 0),
)


class GroupOwner(Protocol):
    """What a frontend needs of a group: ``router.group.Group`` in this process or ``RemoteGroup`` in another one."""

    @property
    def info(self) -> GroupInfo | None: ...

    async def submit(self, request: NewRequest) -> Update: ...

    def watch(
        self, request_id: str, from_position: int, generation: int = 0, choice: int = 0
    ) -> AsyncIterator[Update]: ...

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool: ...


class LocalGroup(GroupOwner, Protocol):
    """The group of this process, which it owns or not."""

    @property
    def state(self) -> str: ...

    @property
    def is_owned(self) -> bool: ...

    @property
    def token(self) -> int | None: ...


class GroupServicer(group_pb2_grpc.GroupServiceServicer):
    """Offers a group to frontends in other processes.

    Attributes:
        draining: while set, new requests are not taken in and running ones go on.
        stopping: while set, nobody follows any more.
    """

    def __init__(
        self,
        group: LocalGroup,
        tokenizer: TextTokenizer,
        grammars: GrammarDoor,
        describe: Callable[[], group_pb2.DescribeResponse],
        *,
        unwatched_s: float = UNWATCHED_S,
    ) -> None:
        self.draining = self.stopping = False
        self._group = group
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._describe = describe
        self._unwatched_s = unwatched_s
        self._watchers: dict[tuple[str, int], int] = {}
        self._aborting: set[asyncio.Task[bool]] = set()

    async def Follow(  # noqa: N802
        self, request: group_pb2.FollowRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[group_pb2.FollowResponse]:
        told: group_pb2.FollowResponse | None = None
        while not self.stopping:
            now = self._facts()
            if now != told:
                told = now
                yield now
            await asyncio.sleep(LOOK_S)

    async def Submit(  # noqa: N802
        self, request: group_pb2.SubmitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.SubmitResponse:
        async with errors_as_status(context, log, call_name("submit", request.request_id)):
            if not request.HasField("sampling"):
                raise InvalidRequest("sampling", None, "set")
            submitted = submit_from_wire(request, self._tokenizer, time.monotonic())
            grammar = submitted.sampling.grammar
            if grammar is not None:
                await self._grammars.run(lambda: self._grammars.check(grammar))
            if self.draining or not self._group.is_owned or self._group.info is None:
                return group_pb2.SubmitResponse(not_here=True)
            start = await self._group.submit(submitted)
            self._expect_watchers(request.request_id, start.generation)
            return group_pb2.SubmitResponse(
                header=common_pb2.Header(epoch=start.epoch, generation=start.generation),
                group_id=self._group.info.group_id,
            )

    async def Watch(  # noqa: N802
        self, request: group_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[group_pb2.WatchResponse]:
        async with errors_as_status(context, log, call_name("watch", request.request_id)):
            check_request_id(request.request_id)
            generation = request.header.generation
            updates = self._group.watch(request.request_id, request.from_position, generation, request.choice)
            key = request.request_id, generation
            self._watchers[key] = self._watchers.get(key, 0) + 1
            try:
                async for update in updates:
                    yield group_pb2.WatchResponse(
                        header=common_pb2.Header(epoch=update.epoch, generation=update.generation),
                        position=update.position,
                        tokens=update.tokens,
                        finish=update.finish,
                        logprobs=[logprobs_to_wire(entry) for entry in update.logprobs],
                        prompt_logprobs=[logprobs_to_wire(entry) for entry in update.prompt_logprobs],
                    )
            finally:
                self._watchers[key] -= 1
                if not self._watchers[key]:
                    del self._watchers[key]
                    self._expect_watchers(*key)

    async def Abort(  # noqa: N802
        self, request: group_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.AbortResponse:
        async with errors_as_status(context, log, call_name("abort", request.request_id)):
            check_request_id(request.request_id)
            found = await self._group.abort(request.request_id, request.reason, request.header.generation)
            return group_pb2.AbortResponse(header=request.header, found=found)

    async def Describe(  # noqa: N802
        self, request: group_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.DescribeResponse:
        async with errors_as_status(context, log, "describe"):
            return self._describe()

    def _facts(self) -> group_pb2.FollowResponse:
        if not self._group.is_owned:
            return group_pb2.FollowResponse(state="waiting for the router that owns the group")
        info = self._group.info
        attached = group_info_to_wire(info) if info is not None else None
        return group_pb2.FollowResponse(state=self._group.state, group=attached, draining=self.draining)

    def _expect_watchers(self, request_id: str, generation: int) -> None:
        """Abort a request of a frontend that is gone, unless somebody watches it soon."""
        if generation:  # of 0, the newest, it is not known whose it is
            loop = asyncio.get_running_loop()
            loop.call_later(self._unwatched_s, self._abort_if_unwatched, request_id, generation)

    def _abort_if_unwatched(self, request_id: str, generation: int) -> None:
        if (request_id, generation) not in self._watchers:
            abort = self._group.abort(request_id, "its frontend is gone", generation)
            task = asyncio.ensure_future(abort)
            self._aborting.add(task)
            task.add_done_callback(self._aborted)

    def _aborted(self, task: asyncio.Task[bool]) -> None:
        self._aborting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("aborting a request of a frontend that is gone failed", exc_info=task.exception())


class GroupPort:
    """The port of ``GroupService``, which nothing else is offered on. Plain, like the ports of ranks and drafts."""

    def __init__(self, host: str, port: int, servicer: GroupServicer) -> None:
        self._host = host
        self._port = port
        self._servicer = servicer
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; returns the port. Raises ``ConfigError`` where it is taken."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        group_pb2_grpc.add_GroupServiceServicer_to_server(self._servicer, self._server)
        try:
            bound = self._server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            bound = 0
            log.debug("%s", error)
        if bound == 0:
            raise ConfigError(
                f"router.group_port: {self._host}:{self._port} is taken; choose another port, or 0 for a free one"
            )
        await self._server.start()
        return bound

    async def stop(self, grace_s: float) -> None:
        """Let watchers hear what they are told at last, for ``grace_s``."""
        self._servicer.stopping = True
        if self._server is not None:
            await self._server.stop(grace_s)

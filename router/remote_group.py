"""A group whose owner is another router, over one channel that every request shares."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from outrider.core.errors import DeadlineExceeded, OutriderError, Unavailable
from outrider.core.errors_wire import DETAILS_KEY, error_from_rpc
from outrider.core.keepalive import channel_keepalive
from outrider.core.plan import GroupInfo
from outrider.core.wire import group_info_from_wire, logprobs_from_wire
from outrider.router.requests import NewRequest
from outrider.router.streams import CHANNEL_OPTIONS
from outrider.router.submission import submit_to_wire
from outrider.router.transcript import Update
from outrider.v1 import common_pb2, group_pb2, group_pb2_grpc

log = logging.getLogger(__name__)

# A peer whose host is gone sends nothing, not even an end: it is asked whether it lives.
PING_MS, PING_TIMEOUT_MS = 5000, 5000
OPTIONS = (*CHANNEL_OPTIONS, *channel_keepalive(PING_MS, PING_TIMEOUT_MS))
ABORT_TIMEOUT_S = 2.0  # whom nobody hears aborts by itself
# How calls end whose peer is gone, or goes at that moment. Whatever else ends them would do so again.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class NotHere(Unavailable):
    """The request was not taken in, for this router does not own the group, or is gone: ask the owner, or the next."""


class RemoteGroup:
    """``Group`` as far as a frontend needs it. ``follow`` it as a task; close it with ``aclose``.

    Attributes:
        address: of the owner's group service.
        state: "ready", or why requests would not be answered, as the owner said last.
        info: what the group is, as the owner said last.
        is_heard: whether the router is being followed at this moment.
        is_owner: whether it says that it owns the group, and had a target.
        is_draining: whether it says that it takes in nothing new.
    """

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        """``timeout_s``: for the owner to take a request in; it may have to wait for others' grammars to compile."""
        self.address = address
        self.state = "waiting for the router that owns the group"
        self.info: GroupInfo | None = None
        self.is_heard = self.is_owner = self.is_draining = False
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._stub: Any = group_pb2_grpc.GroupServiceStub(self._channel)
        self._watches: set[Any] = set()
        self._is_lost = False  # from when it is followed no more until it is heard again
        self._ended: OutriderError | None = None

    async def follow(self, retry_s: float = 0.1) -> None:
        """Keep ``state`` and ``info`` as they are at the owner, until cancelled."""
        told = ""
        while True:
            call = self._stub.Follow(group_pb2.FollowRequest())
            try:
                async for response in call:
                    if response.draining and not self.is_draining:
                        log.info("the router at %s drains: new requests wait for the next owner", self.address)
                    self.is_draining = response.draining
                    if response.HasField("group"):
                        self.info = group_info_from_wire(response.group)
                    self.is_owner = response.HasField("group")
                    self.state = response.state
                    self.is_heard, self._is_lost = True, False
                reason = "it has ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name} {error.details() or ''}".strip()
            except Exception as error:  # what was said last must not stand for what is said now
                reason = f"{type(error).__name__}: {error}"
                if reason != told:
                    log.exception("what the router at %s says is not understood", self.address)
                told = reason
            finally:
                call.cancel()
            if self.is_heard:
                log.warning("lost the router at %s, which owns the group: %s", self.address, reason)
            self.is_heard = self.is_owner = self.is_draining = False
            self._is_lost = True
            self.state = f"lost: no answer from the router at {self.address}, which owns the group"
            await asyncio.sleep(retry_s)

    async def submit(self, request: NewRequest) -> Update:
        """As ``Group.submit``; raises ``NotHere`` where another router may take the request in, ``DeadlineExceeded``
        where the owner said nothing until the request ran out of time.
        """
        now = time.monotonic()
        timeout_s = self._timeout_s if request.deadline is None else min(self._timeout_s, request.deadline - now + 1)
        try:
            response = await self._stub.Submit(submit_to_wire(request, now), timeout=max(0.1, timeout_s))
        except grpc.aio.AioRpcError as error:
            is_late = request.deadline is not None and time.monotonic() > request.deadline
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and is_late and not _has_details(error):
                raise DeadlineExceeded(
                    f"request {request.request_id} ran out of time before it was taken in"
                ) from error
            raise self._meant(error, NotHere if error.code() in GONE else Unavailable) from error
        except asyncio.CancelledError:
            if not self._ended_it():
                raise
            raise NotHere(str(self._ended)) from None
        if response.not_here:
            raise NotHere(f"the router at {self.address} does not own the group any more")
        return Update(response.header.epoch, response.header.generation, len(request.prompt_tokens), ())

    async def watch(
        self, request_id: str, from_position: int, generation: int = 0, choice: int = 0
    ) -> AsyncIterator[Update]:
        """As ``Group.watch``; raises ``Unavailable`` if the owner is gone, and with it the request."""
        request = group_pb2.WatchRequest(
            header=common_pb2.Header(generation=generation),
            request_id=request_id,
            from_position=from_position,
            choice=choice,
        )
        if self._ended is not None:
            raise self._ended
        call = self._stub.Watch(request)
        self._watches.add(call)
        try:
            async for response in call:
                yield _update(response)
        except grpc.aio.AioRpcError as error:
            raise self._meant(error, Unavailable) from error
        except asyncio.CancelledError:
            if self._ended is None or not self._ended_it():
                raise
            raise self._ended from None
        finally:
            self._watches.discard(call)
            call.cancel()

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool:
        """As ``Group.abort``. An owner that is gone is not waited for."""
        if self._is_lost:
            raise Unavailable(f"no answer from the router at {self.address}")
        header = common_pb2.Header(generation=generation)
        request = group_pb2.AbortRequest(header=header, request_id=request_id, reason=reason)
        try:
            return bool((await self._stub.Abort(request, timeout=ABORT_TIMEOUT_S)).found)
        except grpc.aio.AioRpcError as error:
            raise self._meant(error, Unavailable) from error

    async def describe(self, timeout_s: float = 5.0) -> group_pb2.DescribeResponse:
        """What an operator reads of the group. Raises ``Unavailable``."""
        try:
            response: group_pb2.DescribeResponse = await self._stub.Describe(
                group_pb2.DescribeRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise self._meant(error, Unavailable) from error
        return response

    def end(self, error: OutriderError) -> None:
        """Make every watch raise ``error``, now and from now on; the first one stays."""
        self._ended = self._ended or error
        for call in list(self._watches):
            call.cancel()

    async def aclose(self) -> None:
        """End every watch, and the channel."""
        self.end(Unavailable(f"the router at {self.address} does not own the group any more; send the request again"))
        with contextlib.suppress(grpc.RpcError):
            await self._channel.close(None)

    def _ended_it(self) -> bool:
        """Whether it was the call that was cancelled, by ``end`` or ``aclose``, and not whoever waits for it."""
        task = asyncio.current_task()
        return self._ended is not None and not (task is not None and task.cancelling())

    def _meant(self, error: grpc.aio.AioRpcError, broken: type[Unavailable]) -> OutriderError:
        """What the owner said, or ``broken`` where it said nothing."""
        if _has_details(error):
            return error_from_rpc(error)
        if self._ended is not None:
            return self._ended
        reason = f"{error.code().name} {error.details() or ''}".strip()
        what = "is gone" if error.code() in GONE else "does not answer as it should"
        return broken(f"the router at {self.address}, which runs the group, {what} ({reason}); send the request again")


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    """Whether it is the owner that said so, and not gRPC."""
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    return DETAILS_KEY in dict(metadata)


def _update(response: group_pb2.WatchResponse) -> Update:
    return Update(
        epoch=response.header.epoch,
        generation=response.header.generation,
        position=response.position,
        tokens=tuple(response.tokens),
        finish=response.finish if response.HasField("finish") else None,
        logprobs=tuple(logprobs_from_wire(entry) for entry in response.logprobs),
        prompt_logprobs=tuple(logprobs_from_wire(entry) for entry in response.prompt_logprobs),
    )

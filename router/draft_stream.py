"""The stream between a group's scheduler and one draft worker: open, commit and close one way, proposals the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from outrider.core.errors import Unavailable
from outrider.core.plan import GroupInfo
from outrider.core.wire import sampling_to_wire
from outrider.router.drafts import DraftClose, DraftCommit, DraftEvent, DraftOpen
from outrider.router.streams import BidiStream
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc

MAX_BACKLOG = 4096  # messages that a draft may leave unread before it counts as dead


class DraftStream:
    """One connected draft worker. Sending never waits; a draft that does not read is given up."""

    def __init__(self, address: str) -> None:
        self._stream: BidiStream[draft_pb2.SessionRequest, draft_pb2.SessionResponse] = BidiStream(
            address, "draft", lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Session
        )
        self._outbox: deque[draft_pb2.SessionRequest] = deque()
        self._filled = asyncio.Event()

    async def hello(self, scheduler_id: str, info: GroupInfo, epoch: int, timeout_s: float) -> draft_pb2.DraftHello:
        """Say who schedules for which group; returns what the draft is. Raises ``Unavailable``."""
        request = draft_pb2.SessionRequest(
            header=common_pb2.Header(epoch=epoch),
            hello=draft_pb2.SchedulerHello(
                scheduler_id=scheduler_id,
                group_id=info.group_id,
                tokenizer_fingerprint=info.tokenizer_fingerprint,
                vocab_size=info.vocab_size,
            ),
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.write(request)
                response = await self._stream.read()
        except TimeoutError as error:
            raise Unavailable(f"the {self._stream.peer} did not answer within {timeout_s:g} s") from error
        if response.WhichOneof("body") != "hello":
            raise Unavailable(f"the {self._stream.peer} answered 'hello' with {response.WhichOneof('body')}")
        return response.hello

    def send(self, event: DraftEvent, epoch: int) -> None:
        """Queue one message."""
        self._outbox.append(event_to_wire(event, epoch))
        self._filled.set()
        if len(self._outbox) > MAX_BACKLOG:
            self._stream.end(f"the {self._stream.peer} left {MAX_BACKLOG} messages unread")

    async def responses(self) -> AsyncIterator[draft_pb2.SessionResponse]:
        """What the draft says, until the stream ends with ``Unavailable``. Meanwhile what is queued is sent."""
        sender = asyncio.create_task(self._send_all())
        try:
            while True:
                yield await self._stream.read()
        finally:
            sender.cancel()

    def end(self, reason: str) -> None:
        """Make ``responses`` raise ``Unavailable`` with this reason."""
        self._stream.end(reason)

    async def close(self) -> None:
        """End the stream and with it its sessions. Does not raise."""
        await self._stream.close()

    async def _send_all(self) -> None:
        with contextlib.suppress(Unavailable):  # whoever reads the responses learns of it
            while True:
                await self._filled.wait()
                while self._outbox:
                    await self._stream.write(self._outbox.popleft())
                self._filled.clear()


def event_to_wire(event: DraftEvent, epoch: int) -> draft_pb2.SessionRequest:
    """One message to a draft."""
    request = draft_pb2.SessionRequest(header=common_pb2.Header(epoch=epoch, generation=event.generation))
    match event:
        case DraftOpen():
            request.open.session_id = event.session_id
            request.open.tokens.extend(event.tokens)
            request.open.prefix_len = len(event.tokens)
            request.open.prefix_hash = event.prefix_hash
            request.open.sampling.CopyFrom(sampling_to_wire(event.sampling))
            request.open.num_tokens = event.num_tokens
            request.open.traceparent = event.traceparent
        case DraftCommit():
            request.commit.session_id = event.session_id
            request.commit.base_len = event.base_len
            request.commit.tokens.extend(event.tokens)
            request.commit.proposal_id = event.proposal_id
            request.commit.num_accepted = event.num_accepted
            request.commit.hash = event.hash
            request.commit.num_tokens = event.num_tokens
            request.commit.traceparent = event.traceparent
        case DraftClose():
            request.close.session_id = event.session_id
    return request

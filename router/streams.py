"""A bidirectional gRPC stream whose every failure is one exception with one line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from outrider.core.errors import Unavailable

Request = TypeVar("Request")
Response = TypeVar("Response")

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs do not know it

CHANNEL_OPTIONS = (
    # Rows of draft probabilities and results of large batches exceed gRPC's default of 4 MiB.
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.max_receive_message_length", 256 << 20),
    # A new process may listen on an address that was dead a moment ago.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels are few and long-lived; a shared pool of connections would outlive them.
    ("grpc.use_local_subchannel_pool", 1),
)


class Refused(Unavailable):
    """The peer said that the two do not fit: trying again cannot help."""


class BidiStream(Generic[Request, Response]):
    """Messages to and from one peer. ``write`` and ``read`` raise ``Unavailable`` once the stream is over."""

    def __init__(self, address: str, peer: str, method: Callable[[grpc.aio.Channel], Any]) -> None:
        """``peer`` names the other side in errors; ``method`` takes the RPC from a channel."""
        self.address = address
        self.peer = f"{peer} at {address}"
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call: Any = method(self._channel)()  # grpc-stubs know neither the calls' EOF nor their reader API
        self._ended: Unavailable | None = None

    async def write(self, message: Request) -> None:
        await self._guarded(self._call.write(message))

    async def read(self) -> Response:
        response = await self._guarded(self._call.read())
        if response is EOF:
            raise await self._why_over()
        return response

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once the stream is over."""
        self._call.add_done_callback(lambda _: callback())

    def check(self) -> None:
        """Raises ``Unavailable`` if the stream is over."""
        if self._ended is not None:
            raise self._ended
        if self._call.done():
            raise self._broken("it has ended")

    def end(self, reason: str) -> None:
        """Make pending and later calls raise ``Unavailable(reason)``; the first reason stays."""
        self._ended = self._ended or Unavailable(reason)
        self._call.cancel()

    async def close(self) -> None:
        """End the stream and its connection. Does not raise."""
        self.end(f"the stream to the {self.peer} was closed")
        with contextlib.suppress(grpc.RpcError):
            await self._channel.close(None)

    async def _guarded(self, operation: Any) -> Any:
        try:
            return await operation
        except grpc.aio.AioRpcError as error:
            raise self._refused_or_broken(error.code(), error.details() or "") from error
        except asyncio.InvalidStateError as error:
            raise self._broken("it has ended") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._ended is None or (task is not None and task.cancelling()):
                raise  # whoever waits here was cancelled, not the call
            raise self._ended from None

    def _broken(self, reason: str) -> Unavailable:
        return self._ended or Unavailable(f"the stream to the {self.peer} broke: {reason}")

    def _refused_or_broken(self, code: grpc.StatusCode, details: str) -> Unavailable:
        if code is grpc.StatusCode.FAILED_PRECONDITION and self._ended is None:
            return Refused(f"the {self.peer} refuses: {details}")
        return self._broken(f"{code.name} {details}".strip())

    async def _why_over(self) -> Unavailable:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return self._refused_or_broken(await self._call.code(), await self._call.details() or "")
        return self._broken("no status")

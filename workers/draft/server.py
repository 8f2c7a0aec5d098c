"""The gRPC face of a draft worker: DraftService, health and reflection, in an event loop with a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.core.errors import InvalidRequest, Unavailable
from outrider.core.keepalive import server_keepalive
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.workers.draft.compute import ComputeThread
from outrider.workers.draft.messages import CloseStream, Event, command_from_wire, event_to_wire
from outrider.workers.draft.outbox import Outbox

logger = logging.getLogger(__name__)

EOF: Any = aio.EOF  # type: ignore[attr-defined]

# A stream that says nothing for so long is ended.
HELLO_TIMEOUT_S = 10.0
SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A scheduler whose machine vanished says nothing: pings find out, so that its sessions do not hold blocks for ever.
    # Schedulers may find out about us in the same way.
    *server_keepalive(10_000, 5_000, allowed_ms=1_000),
    # Two servers on one port would share its connections.
    ("grpc.so_reuseport", 0),
)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Carries messages between schedulers' streams and the compute thread. Lives in one event loop."""

    def __init__(self, hello: draft_pb2.DraftHello) -> None:
        self.compute: ComputeThread | None = None
        self._hello = hello
        self._outboxes: dict[int, Outbox] = {}
        self._stream_ids = itertools.count(1)
        self._failure: str | None = None

    def deliver(self, events: Sequence[Event]) -> None:
        """Hand answers to the streams that they belong to; those of streams that are gone are dropped."""
        for event in events:
            outbox = self._outboxes.get(event.address.stream)
            if outbox is not None:
                outbox.put(event)

    def close(self, failure: str | None = None) -> None:
        """End every stream: after what waits to be sent, or at once with UNAVAILABLE if the worker failed."""
        self._failure = failure or "the draft worker shuts down"
        for outbox in self._outboxes.values():
            outbox.close(failure)

    async def Session(  # type: ignore[override] # noqa: N802 - gRPC's name
        self, request_iterator: Any, context: Any
    ) -> None:
        compute = self.compute
        if compute is None or self._failure is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._failure or "the draft worker starts")
            return
        stream = next(self._stream_ids)
        outbox = self._outboxes[stream] = Outbox()
        reader = asyncio.create_task(self._read(stream, context, outbox, compute))
        try:
            while (event := await outbox.get()) is not None:
                await context.write(event_to_wire(event))
            if outbox.error is not None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, outbox.error)
            if reader.done():
                error = reader.exception()
                if isinstance(error, _Refused):
                    await context.abort(error.code, str(error))
                if error is not None:
                    raise error
        finally:
            del self._outboxes[stream]
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reader
            compute.submit(CloseStream(stream))

    async def _read(self, stream: int, context: Any, outbox: Outbox, compute: ComputeThread) -> None:
        """Greet the scheduler, then hand on its messages; the outbox is closed at the end, whatever the end is."""
        try:
            await self._greet(context)
            while (message := await context.read()) is not EOF:
                compute.submit(command_from_wire(stream, message))
        except InvalidRequest as error:
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        finally:
            outbox.close()

    async def _greet(self, context: Any) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError as error:
            why = f"no hello came within {HELLO_TIMEOUT_S:g} s"
            raise _Refused(grpc.StatusCode.DEADLINE_EXCEEDED, why) from error
        if first is EOF or first.WhichOneof("body") != "hello":
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a Session must be hello")
        theirs, ours = first.hello.tokenizer_fingerprint, self._hello.tokenizer_fingerprint
        if theirs != ours:
            raise _Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"tokenizers differ: the draft {self._hello.model} has fingerprint {ours}, the target of group "
                f"{first.hello.group_id} has {theirs}; give both models the same tokenizer.json",
            )
        await context.write(draft_pb2.SessionResponse(header=first.header, hello=self._hello))


class _Refused(Exception):
    """Ends a stream with a status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.code = code
        super().__init__(message)


class DraftServer:
    """Runs a servicer in a thread. ``start`` returns the address; ``stop`` ends the streams and the thread."""

    def __init__(self, servicer: DraftServicer) -> None:
        self._servicer = servicer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="draft-grpc", daemon=True)
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: aio.Server | None = None

    def start(self, host: str, port: int = 0) -> str:
        """Listen on an address; port 0 takes a free one. Raises ``Unavailable`` if that fails."""
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(host, port), self._loop).result()

    def deliver(self, events: Sequence[Event]) -> None:
        """Thread-safe ``DraftServicer.deliver``."""
        self._call(self._servicer.deliver, events)

    def fail(self, failure: str) -> None:
        """End all streams with UNAVAILABLE and refuse new ones; the health service says NOT_SERVING."""
        self._call(self._servicer.close, failure)
        asyncio.run_coroutine_threadsafe(self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING), self._loop)

    def stop(self, grace_s: float = 1.0) -> None:
        """Send what waits, end the streams, and the thread. A second call does nothing."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._stop(grace_s), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Any, argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, argument)

    async def _start(self, host: str, port: int) -> str:
        server = aio.server(options=SERVER_OPTIONS)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME),
            server,
        )
        bound = f"[{host}]" if ":" in host else host
        try:
            port = server.add_insecure_port(f"{bound}:{port}")
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {bound}:{port}: {error}") from error
        await server.start()
        self._server = server
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return f"{bound}:{port}"

    async def _stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        self._servicer.close()
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _set_health(self, status: Any) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

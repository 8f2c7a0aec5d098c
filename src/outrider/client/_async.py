"""The client itself."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Unpack

import grpc
from google.protobuf.json_format import MessageToDict

from outrider.client._answer import Answer
from outrider.client._completion import Completion, Delta
from outrider.client._endpoint import Endpoint
from outrider.client._request import Options, Prompt, build_request, verifier_number
from outrider.client._values import unsigned
from outrider.core.errors import OutriderError, Unavailable
from outrider.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20))


class AsyncClient:
    """A connection to a router. Use it within one event loop, and close it: ``async with`` or ``aclose``."""

    def __init__(
        self,
        address: str | Endpoint | None = None,
        *,
        timeout: float = 600.0,
        ca_certs: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        client_cert: str | os.PathLike[str] | None = None,
        client_key: str | os.PathLike[str] | None = None,
    ) -> None:
        """``address`` is ``host:port`` of a router, or all that an ``Endpoint`` says of one.

        The last four are those of ``Endpoint``; they and ``address`` are taken from the environment where they are not
        given: OUTRIDER_ADDRESS, OUTRIDER_CA_CERTS, OUTRIDER_API_KEY, OUTRIDER_CLIENT_CERT, OUTRIDER_CLIENT_KEY.
        ``timeout``, in seconds, holds where a call names none. Raises ``ConfigError`` where no address is named, or a
        file cannot be used.
        """
        if not isinstance(address, Endpoint):
            address = Endpoint.named(
                address, ca_certs=ca_certs, api_key=api_key, client_cert=client_cert, client_key=client_key
            )
        self.address = address.address
        self.timeout = timeout
        self._endpoint = address
        self._channel = address.open_channel(CHANNEL_OPTIONS)
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; requests that still run are cancelled."""
        await self._channel.close(None)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to a prompt. ``options`` are those of ``stream``."""
        async with self.stream(prompt, **options) as stream:
            async for _ in stream.events():
                pass
        return stream.completion

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it comes; leaving it early cancels the request.

        ``prompt`` is a text, a list of token ids, or a chat (a list of ``{"role": ..., "content": ...}``).
        ``options`` are the keywords of ``outrider.client.Options``; each may be left out.
        """
        request = build_request(prompt, **options)
        timeout = options.get("timeout")
        return AsyncStream(self._generation, request, self.timeout if timeout is None else timeout, self._endpoint)

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a request. False if no such request runs."""
        request = generation_pb2.GenerationServiceAbortRequest(request_id=request_id)
        return bool((await self._call(self._generation.Abort, request, timeout)).found)

    async def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """What the router knows: groups, ranks, drafts, queue, cache use (the fields of ``StatusResponse``)."""
        return _to_dict(await self._call(self._admin.Status, admin_pb2.StatusRequest(), timeout))

    async def get_settings(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The live settings of the cluster: num_speculative_tokens and verifier."""
        response = await self._call(self._admin.GetSettings, admin_pb2.GetSettingsRequest(), timeout)
        return _settings_to_dict(response.settings)

    async def update_settings(
        self, *, num_speculative_tokens: int | None = None, verifier: str | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Change live settings for requests that come from now on, on every router; returns all of them.

        Raises ``InvalidRequest``.
        """
        settings = admin_pb2.LiveSettings()
        if num_speculative_tokens is not None:
            settings.num_speculative_tokens = unsigned("settings.num_speculative_tokens", num_speculative_tokens, 32)
        if verifier is not None:
            settings.verifier = verifier_number("settings.verifier", verifier)  # type: ignore[assignment]
        request = admin_pb2.UpdateSettingsRequest(settings=settings)
        return _settings_to_dict((await self._call(self._admin.UpdateSettings, request, timeout)).settings)

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            timeout = self.timeout if timeout is None else timeout
            return await method(request, timeout=timeout, metadata=self._endpoint.metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._endpoint.error_of(error) from error


class AsyncStream:
    """One answer as it comes. Iterate over it for text, or over ``events`` for text and tokens; not over both.

    Attributes:
        request_id: known from the first piece on.
    """

    def __init__(self, stub: Any, request: generation_pb2.GenerateRequest, timeout: float, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._call: Any = stub.Generate(request, timeout=timeout, metadata=endpoint.metadata)
        self._answer = Answer(request, time.perf_counter())
        self._closed = False

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the request if it still runs."""
        self._closed = True
        self._call.cancel()

    @property
    def request_id(self) -> str:
        return self._answer.request_id

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has ended. Raises ``OutriderError`` before."""
        return self._answer.completion

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text; with ``echo`` the prompt's is the first one. Raises ``OutriderError`` for several choices."""
        if self._answer.num_choices > 1:
            raise OutriderError("the texts of several choices come side by side; iterate over events() instead")
        events = self.events()
        delta = await anext(events, None)
        if self._answer.prompt_text:  # it comes before the first piece
            yield self._answer.prompt_text
        while delta is not None:
            if delta.text:
                yield delta.text
            delta = await anext(events, None)

    async def events(self) -> AsyncIterator[Delta]:
        """Pieces of text with their tokens; each names its choice. Raises what ``outrider.core.errors`` holds."""
        try:
            async for response in self._call:
                delta = self._answer.take(response, time.perf_counter())
                if delta is not None:
                    yield delta
        except grpc.aio.AioRpcError as error:
            raise await self._endpoint.error_of(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise  # whoever iterates was cancelled, not the call
            raise OutriderError("the stream was closed before its end") from None
        if not self._answer.ended:
            raise Unavailable(f"{self._endpoint.address} ended the stream before the answer did")


def _to_dict(message: Any) -> dict[str, Any]:
    answer: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _whole_numbers(message, answer)
    if "settings" in answer:
        answer["settings"] = _settings_to_dict(message.settings)
    return answer


def _whole_numbers(message: Any, answer: dict[str, Any]) -> None:
    """JSON of protobuf writes 64-bit numbers as strings; Python's has no need to."""
    for field, value in answer.items():
        if isinstance(value, str):
            number = getattr(message, field)
            answer[field] = number if isinstance(number, int) else value
        elif isinstance(value, list):
            for item, part in zip(getattr(message, field), value, strict=True):
                if isinstance(part, dict):
                    _whole_numbers(item, part)


def _settings_to_dict(settings: admin_pb2.LiveSettings) -> dict[str, Any]:
    from outrider.core.sampling import Verifier

    return {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "verifier": Verifier(settings.verifier).label if settings.verifier else None,
    }

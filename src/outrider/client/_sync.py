"""The client for code without an event loop: it runs the asynchronous one to the end of each call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, TypeVar, Unpack

from outrider.client._async import AsyncClient, AsyncStream
from outrider.client._completion import Completion, Delta
from outrider.client._endpoint import Endpoint
from outrider.client._request import Options, Prompt

T = TypeVar("T")


class Client:
    """A connection to a router, for one thread at a time. Within asynchronous code use ``AsyncClient``."""

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
        """As ``AsyncClient``."""

        async def made() -> AsyncClient:  # within the loop that will use it
            return AsyncClient(
                address,
                timeout=timeout,
                ca_certs=ca_certs,
                api_key=api_key,
                client_cert=client_cert,
                client_key=client_key,
            )

        self._runner = asyncio.Runner()
        self._client = self._runner.run(made())

    @property
    def address(self) -> str:
        """Of the router."""
        return self._client.address

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; requests that still run are cancelled."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """As ``AsyncClient.generate``."""
        return self._runner.run(self._client.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """As ``AsyncClient.stream``."""

        async def started() -> AsyncStream:
            return self._client.stream(prompt, **options)

        return Stream(self._runner, self._runner.run(started()))

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """As ``AsyncClient.abort``."""
        return self._runner.run(self._client.abort(request_id, timeout=timeout))

    def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """As ``AsyncClient.status``."""
        return self._runner.run(self._client.status(timeout=timeout))

    def get_settings(self, *, timeout: float | None = None) -> dict[str, Any]:
        """As ``AsyncClient.get_settings``."""
        return self._runner.run(self._client.get_settings(timeout=timeout))

    def update_settings(
        self, *, num_speculative_tokens: int | None = None, verifier: str | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """As ``AsyncClient.update_settings``."""
        return self._runner.run(
            self._client.update_settings(
                num_speculative_tokens=num_speculative_tokens, verifier=verifier, timeout=timeout
            )
        )


class Stream:
    """One answer as it comes (``AsyncStream``)."""

    def __init__(self, runner: asyncio.Runner, stream: AsyncStream) -> None:
        self._runner = runner
        self._stream = stream

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs."""
        self._runner.run(self._stream.aclose())

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has ended. Raises ``OutriderError`` before."""
        return self._stream.completion

    def __iter__(self) -> Iterator[str]:
        """As over an ``AsyncStream``."""
        return self._each(aiter(self._stream))

    def events(self) -> Iterator[Delta]:
        """As ``AsyncStream.events``."""
        return self._each(self._stream.events())

    def _each(self, pieces: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                piece = self._runner.run(_next(pieces))
            except StopAsyncIteration:
                return
            yield piece


async def _next(pieces: AsyncIterator[T]) -> T:
    return await anext(pieces)

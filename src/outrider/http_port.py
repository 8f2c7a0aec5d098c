"""A port that answers over HTTP on the event loop of its process: its socket, and uvicorn from beginning to end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from outrider.core.errors import ConfigError


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the process's


class HttpPort:
    """Listens from ``listen`` on, answers while ``serve`` runs.

    Attributes:
        url: where it listens, such as ``http://127.0.0.1:8000``, with ``path``; empty before ``listen``.
    """

    def __init__(
        self,
        field: str,
        host: str,
        port: int,
        app: ASGIApp,
        *,
        path: str,
        nothing: str,
        last_words_s: float,
        tls: ssl.SSLContext | None = None,
        backlog: int | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            field: the setting that errors name.
            nothing: what null stands for there.
            last_words_s: for answers under way when it stops.
            options: uvicorn's.
        """
        self.url = ""
        self._field, self._host, self._port, self._path, self._nothing = field, host, port, path, nothing
        self._backlog = backlog
        self._socket: socket.socket | None = None
        self._over = asyncio.Event()
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=last_words_s,  # type: ignore[arg-type]  # asyncio takes fractions
            **options,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)

    def listen(self) -> None:
        """Raises ``ConfigError`` for an address that cannot be listened on."""
        self._socket = self._bound()
        shown = f"[{self._host}]" if ":" in self._host else self._host
        scheme = "http" if self._server.config.ssl is None else "https"
        self.url = f"{scheme}://{shown}:{self._socket.getsockname()[1]}{self._path}"

    async def serve(self) -> None:
        """Answer until cancelled or stopped."""
        if self._socket is None:
            raise RuntimeError("serve before listen")
        try:
            await self._server.serve([self._socket])
        finally:
            self._close()
            self._over.set()

    def drain(self) -> None:
        """End connections that wait for a request, and the others with the answer that is under way."""
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        """Take no more connections, and let answers under way end if they are quick. Cancel ``serve`` then."""
        if self._server.server_state.connections:
            self._server.should_exit = True
            await self._over.wait()
        self._close()

    def _close(self) -> None:
        # By the event loop where it listens already: it would go on to watch a socket that was closed behind its back.
        for listener in getattr(self._server, "servers", ()):
            listener.close()
        if self._socket is not None:
            self._socket.close()

    def _bound(self) -> socket.socket:
        host, port = self._host, self._port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family, backlog=self._backlog)
        except OSError as error:
            raise ConfigError(
                f"{self._field}: cannot listen on {host}:{port} ({error.strerror}); choose another, 0 for a free one, "
                f"or null for {self._nothing}"
            ) from error

"""The HTTP server, on the event loop of its router."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from outrider.cluster.config import RouterConfig
from outrider.core.errors import ConfigError
from outrider.router.certificates import Certificates

KEEP_ALIVE_S = 75  # longer than proxies in front keep a connection, so that it is they who end it
BACKLOG = 2048  # connections that wait to be taken
LAST_WORDS_S = 3.0  # for clients to read the errors by which answers end that are under way when the server stops


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the router's


class HttpDoor:
    """Listens from ``listen`` on, answers while ``serve`` runs.

    Attributes:
        url: where clients point to, such as ``http://127.0.0.1:8000/v1``; empty before ``listen``.
    """

    def __init__(self, config: RouterConfig, app: ASGIApp, certificates: Certificates | None) -> None:
        self.url = ""
        self._certificates = certificates
        self._config = config
        self._app = app
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._over = asyncio.Event()

    def listen(self) -> None:
        """Raises ``ConfigError`` for an address that is taken."""
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,  # type: ignore[arg-type]  # asyncio takes fractions
        )
        config.load()
        config.ssl = self._certificates.ssl_context() if self._certificates is not None else None
        self._server = _Server(config)
        self._socket = self._bound()
        host, port = self._config.host, self._socket.getsockname()[1]
        scheme = "https" if self._certificates is not None else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def serve(self) -> None:
        """Answer until ``stop``."""
        if self._server is None or self._socket is None:
            raise RuntimeError("serve before listen")
        try:
            await self._server.serve([self._socket])
        finally:
            self._close()
            self._over.set()

    def drain(self) -> None:
        """End connections that wait for a request, and the others with the answer that is under way."""
        if self._server is not None:
            for connection in list(self._server.server_state.connections):
                connection.shutdown()

    async def stop(self) -> None:
        """Take no more connections, and let answers under way end if they are quick. Cancel ``serve`` then."""
        if self._server is not None and self._server.server_state.connections:
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
        host, port = self._config.host, self._config.http_port or 0
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"router.http_port: cannot listen on {host}:{port} ({error.strerror}); choose another, 0 for a free "
                "one, or null for no HTTP"
            ) from error

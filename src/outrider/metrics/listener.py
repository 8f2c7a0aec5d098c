"""A plain HTTP port for Prometheus and the kubelet, on the event loop of its process.

It speaks no TLS and knows no keys, as probes and most scrapers do not either: let a network policy say who gets there.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from outrider.core.errors import ConfigError
from outrider.metrics.declared import CONTENT_TYPE

LAST_WORDS_S = 1.0  # for answers under way when it stops

Tell = Callable[[], Awaitable[str]]
State = Callable[[], str]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the process's


class MetricsListener:
    """Listens from ``listen`` on, answers while ``serve`` runs.

    Attributes:
        url: of ``/metrics``; empty before ``listen``.
    """

    def __init__(self, field: str, host: str, port: int, *, tell: Tell, state: State) -> None:
        """``field`` names the setting in errors; ``tell`` gives the metrics, ``state`` "ready" or why not."""
        self.url = ""
        self._field, self._host, self._port = field, host, port
        self._app = make_app(tell, state)
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._over = asyncio.Event()

    def listen(self) -> None:
        """Raises ``ConfigError`` for an address that cannot be listened on."""
        host, port = self._host, self._port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"{self._field}: cannot listen on {host}:{port} ({error.strerror}); choose another, 0 for a free one, "
                "or null for none"
            ) from error
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS_S,  # type: ignore[arg-type]  # asyncio takes fractions
        )
        self._server = _Server(config)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/metrics"

    async def serve(self) -> None:
        """Answer until cancelled or stopped."""
        if self._server is None or self._socket is None:
            raise RuntimeError("serve before listen")
        try:
            await self._server.serve([self._socket])
        finally:
            self._close()
            self._over.set()

    async def stop(self) -> None:
        """Take no more connections, and let answers under way end if they are quick. Cancel ``serve`` then."""
        if self._server is not None and self._server.server_state.connections:
            self._server.should_exit = True
            await self._over.wait()
        self._close()

    def _close(self) -> None:
        for listener in getattr(self._server, "servers", ()):
            listener.close()
        if self._socket is not None:
            self._socket.close()


def make_app(tell: Tell, state: State) -> Starlette:
    """``/metrics``; ``/livez``, which is well as long as it answers; ``/readyz``."""

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(await tell(), media_type=CONTENT_TYPE)

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        now = state()
        return PlainTextResponse(f"{now}\n", 200 if now == "ready" else 503)

    table = {"/metrics": metrics, "/livez": livez, "/readyz": readyz}
    return Starlette(routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in table.items()])

"""A plain HTTP port for Prometheus and the kubelet, on the event loop of its process.

It speaks no TLS and knows no keys, as probes and most scrapers do not either: let a network policy say who gets there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from outrider.http_port import HttpPort
from outrider.metrics.declared import CONTENT_TYPE

LAST_WORDS_S = 1.0  # for answers under way when it stops

Tell = Callable[[], Awaitable[str]]
State = Callable[[], str]


def metrics_listener(field: str, host: str, port: int, *, tell: Tell, state: State) -> HttpPort:
    """Its ``url`` is that of ``/metrics``.

    ``field`` names the setting in errors; ``tell`` gives the metrics, ``state`` "ready" or why not.
    """
    app = make_app(tell, state)
    return HttpPort(field, host, port, app, path="/metrics", nothing="none", last_words_s=LAST_WORDS_S)


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

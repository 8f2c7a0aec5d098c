"""The HTTP server, on the event loop of its router."""

from __future__ import annotations

from starlette.types import ASGIApp

from outrider.cluster.config import RouterConfig
from outrider.http_port import HttpPort
from outrider.router.certificates import Certificates

KEEP_ALIVE_S = 75  # longer than proxies in front keep a connection, so that it is they who end it
BACKLOG = 2048  # connections that wait to be taken
LAST_WORDS_S = 3.0  # for clients to read the errors by which answers end that are under way when the server stops


def http_door(config: RouterConfig, app: ASGIApp, certificates: Certificates | None) -> HttpPort:
    """Where clients point to: its ``url`` is such as ``http://127.0.0.1:8000/v1``."""
    return HttpPort(
        "router.http_port",
        config.host,
        config.http_port or 0,
        app,
        path="/v1",
        nothing="no HTTP",
        last_words_s=LAST_WORDS_S,
        tls=certificates.ssl_context() if certificates is not None else None,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )

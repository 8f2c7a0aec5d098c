"""Under which address others reach a port of this process."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

WILDCARDS = frozenset({"0.0.0.0", "::", "[::]", "*", ""})


def reachable_host(host: str, redis_url: str) -> str:
    """``host``, or where that stands for every address of the machine, the one by which it reaches Redis: there every
    process of the cluster has a way. Nothing is sent.
    """
    if host not in WILDCARDS:
        return host
    parts = urlsplit(redis_url)
    try:
        peer = socket.getaddrinfo(parts.hostname or "localhost", parts.port or 6379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(peer[0], socket.SOCK_DGRAM) as probe:
            probe.connect(peer[4])
            address = str(probe.getsockname()[0])
    except (OSError, ValueError):  # a Redis behind a socket file, say
        return socket.gethostname()
    return f"[{address}]" if ":" in address else address

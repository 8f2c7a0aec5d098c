"""How one finds out about a gRPC peer that has fallen silent: its host is gone, and not even an end will come.

It is asked whether it lives, by pings of HTTP/2 that gRPC sends and answers by itself, however busy the process is.
"""

from __future__ import annotations

Options = tuple[tuple[str, int], ...]


def channel_keepalive(ping_ms: int, timeout_ms: int) -> Options:
    """Options of a channel, or part of a server's: after ``ping_ms`` of silence a peer is asked, and is taken for dead,
    with every call of it, where nothing comes for ``timeout_ms`` more. The server must allow it (``server_keepalive``).
    """
    return (
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # which holds instead since gRPC has it; its default is a minute
        ("grpc.http2.max_pings_without_data", 0),  # no limit
    )


def server_keepalive(ping_ms: int, timeout_ms: int, allowed_ms: int) -> Options:
    """Options of a server that asks its peers so, and lets them ask every ``allowed_ms`` while nothing else is sent."""
    return (
        *channel_keepalive(ping_ms, timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", min(ping_ms, allowed_ms)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", allowed_ms),
    )

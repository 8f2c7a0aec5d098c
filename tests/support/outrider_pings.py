"""Servers that find out sooner than in use that a peer has fallen silent."""

from __future__ import annotations

from collections.abc import Sequence

PINGS = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


def with_quick_pings(options: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Each time of the options that ask a peer whether it lives divided by 20. What gRPC would put in place of one that
    is missing stays: the timeout of a minute is longer than a test waits.
    """
    return [(name, value // 20 if name in PINGS else value) for name, value in options]

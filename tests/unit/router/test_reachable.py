"""Where others reach a port of a router."""

from __future__ import annotations

import socket

import pytest

from outrider.router.reachable import reachable_host


@pytest.mark.parametrize(
    ("host", "redis_url", "expected"),
    [
        ("10.1.2.3", "redis://127.0.0.1:6379", "10.1.2.3"),
        ("router.example", "redis://127.0.0.1:6379", "router.example"),
        ("0.0.0.0", "redis://127.0.0.1:6379", "127.0.0.1"),
        ("0.0.0.0", "rediss://user:word@127.0.0.1", "127.0.0.1"),
        ("::", "redis://[::1]:6379", "[::1]"),
    ],
)
def test_every_address_stands_for_the_one_towards_redis(host: str, redis_url: str, expected: str) -> None:
    if "[::1]" in redis_url:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("::1", 9))
            except OSError:
                pytest.skip("no IPv6 here")
    assert reachable_host(host, redis_url) == expected


def test_a_redis_behind_a_file_leaves_the_name_of_the_host() -> None:

    assert reachable_host("0.0.0.0", "unix:///run/redis.sock") in {socket.gethostname(), "127.0.0.1"}

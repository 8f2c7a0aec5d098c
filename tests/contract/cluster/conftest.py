from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cluster.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may kill."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.stop()

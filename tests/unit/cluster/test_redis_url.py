"""Where Redis is: user, password and CA of the settings become parts of one URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis

from outrider.cluster.config import ClusterConfig, parse_config
from outrider.cluster.redis_url import connection_url
from outrider.cluster.registry import masked
from outrider.core.errors import ConfigError

PASSWORD = "it's a %40/:@#?$(X)[é] password"


def config_of(folder: Path, **settings: Any) -> ClusterConfig:
    return parse_config(json.dumps({"redis": settings, "target": {"model": "m"}}), base=folder)


def test_what_redis_py_reads_is_what_the_settings_say(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    (tmp_path / "ca.crt").write_text("a certificate")
    config = config_of(tmp_path, url="rediss://h:6390/3", username="o:u@t", password_file="password", ca_certs="ca.crt")
    url = connection_url(config.redis)
    assert url is not None
    options = redis.ConnectionPool.from_url(url).connection_kwargs
    assert (
        options.items()
        >= {
            **{"host": "h", "port": 6390, "db": 3, "username": "o:u@t", "password": PASSWORD},
            "ssl_ca_certs": str(tmp_path / "ca.crt"),
        }.items()
    )
    assert PASSWORD not in masked(url)
    assert "password" not in masked(url)


def test_a_password_needs_no_user(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    url = connection_url(config_of(tmp_path, url="redis://[::1]:6390/0", password_file="password").redis)
    assert url == "redis://:secret@[::1]:6390/0"


def test_a_url_alone_stays_as_it_is(tmp_path: Path) -> None:
    assert connection_url(config_of(tmp_path, url="redis://:x@h:1/2").redis) == "redis://:x@h:1/2"
    assert connection_url(config_of(tmp_path).redis) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"username": "u"}, "username is set, but url is not"),
        ({"url": "redis://h", "ca_certs": "ca"}, "rediss://"),
        ({"url": "redis://:x@h", "password_file": "f"}, "url has a user or password"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        config_of(tmp_path, **settings)
    assert "redis" in str(refusal.value)


@pytest.mark.parametrize(("content", "words"), [(None, "cannot read"), ("\n", "is empty")])
def test_a_file_without_a_password_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "password").write_text(content)
    config = config_of(tmp_path, url="redis://h", password_file="password")
    with pytest.raises(ConfigError, match=rf"redis\.password_file: .*{words}"):
        connection_url(config.redis)


def test_a_ca_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, url="rediss://h", ca_certs="ca.crt")
    with pytest.raises(ConfigError, match=r"redis\.ca_certs: .* is no file"):
        connection_url(config.redis)

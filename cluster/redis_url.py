"""The URL that processes reach Redis by: that of the settings, with user, password and CA in it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from outrider.cluster.config import RedisConfig
from outrider.core.errors import ConfigError


def connection_url(config: RedisConfig) -> str | None:
    """None where the settings name no Redis. Not for messages: see ``registry.masked``.

    Raises ``ConfigError`` if the file with the password cannot be read or is empty, or the CA's is not there.
    """
    if config.url is None:
        return None
    parts = urlsplit(config.url)
    if config.username is not None or config.password_file is not None:
        password = "" if config.password_file is None else _password(Path(config.password_file))
        login = f"{quote(config.username or '', safe='')}:{quote(password, safe='')}"
        parts = parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}")
    if config.ca_certs is not None:
        if not Path(config.ca_certs).is_file():
            raise ConfigError(f"redis.ca_certs: {config.ca_certs} is no file")
        query = urlencode({"ssl_ca_certs": config.ca_certs}, safe="/")
        parts = parts._replace(query="&".join(part for part in (parts.query, query) if part))
    return urlunsplit(parts)


def _password(file: Path) -> str:
    """Without the end of its line."""
    try:
        password = file.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"redis.password_file: cannot read {file}: {error}") from error
    if not password:
        raise ConfigError(f"redis.password_file: {file} is empty")
    return password

"""How to reach Redis: its address, who logs in, and whom its certificate must come from."""

from __future__ import annotations

import dataclasses
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import redis.asyncio
from pydantic import ValidationError
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, NoPermissionError

from outrider.cluster.config import RedisConfig
from outrider.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RedisAccess:
    """Goes to the processes of a cluster as it is, also to those on hosts that lack its files. ``str`` and ``repr``
    show no password.

    Attributes:
        url: without user and password.
        username: empty for Redis' default user.
        password: the one to use where ``password_file`` cannot be read.
        password_file: read for each new connection.
        ca_data: CAs in PEM that are trusted beside the system's.
    """

    url: str
    username: str = ""
    password: str = field(default="", repr=False)
    password_file: str | None = None
    ca_data: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, config: RedisConfig | None = None) -> RedisAccess:
        """As a URL and the settings beside it say. Raises ``ConfigError`` where those cannot be used."""
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"redis.url is no URL: {error}") from None  # it may hold a password
        access = cls(
            url=urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])),
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
        )
        if config is None:
            return access
        try:  # config.url was checked with the rest of the settings, but a variable may name another
            config = RedisConfig.model_validate({**config.model_dump(), "url": url})
        except ValidationError as error:
            raise ConfigError(f"redis: {error.errors()[0]['msg']}") from None  # its input holds the password
        changes: dict[str, Any] = {}
        if config.username is not None:
            changes["username"] = config.username
        if config.password_file is not None:
            try:
                password = _password(config.password_file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"redis.password_file: {config.password_file}: {_reason(error)}") from error
            changes |= {"password": password, "password_file": config.password_file}
        if config.ca_certs is not None:
            changes["ca_data"] = _ca_data(config.ca_certs)
        return dataclasses.replace(access, **changes)

    def __str__(self) -> str:
        """As it may stand in messages."""
        if not self.username and not self.has_password:
            return self.url
        parts = urlsplit(self.url)
        secret = ":***" if self.has_password else ""
        return urlunsplit(parts._replace(netloc=f"{quote(self.username)}{secret}@{parts.netloc}"))

    @property
    def has_password(self) -> bool:
        return bool(self.password or self.password_file)

    def client(self, **options: Any) -> redis.asyncio.Redis:
        """A client of redis-py, which connects at its first command. Raises ``ConfigError``."""
        if self.has_password or self.username:
            options["credential_provider"] = _Login(self)
        if self.ca_data is not None:
            options["ssl_ca_data"] = self.ca_data
        try:
            return redis.asyncio.Redis.from_url(self.url, **options)
        except ValueError as error:
            raise ConfigError(f"redis.url is {str(self)!r}, which is no Redis URL: {error}") from error

    def advice(self, error: BaseException) -> str:
        """What to do about a command that failed; it names the setting."""
        line = f"{error} {error.__cause__ or ''}"
        if isinstance(error, NoPermissionError):
            return "give another redis.username, or let this one do it"
        if isinstance(error, AuthenticationError) or "NOAUTH" in line or "already authenticated" in line:
            given = "is not the one that it wants" if self.has_password else "is missing"
            return f"the password {given}: see redis.password_file and redis.username"
        if "CERTIFICATE_VERIFY_FAILED" in line:
            return "its certificate must be signed by one of redis.ca_certs, and name the host of redis.url"
        is_tls = self.url.startswith("rediss:")
        if is_tls and ("WRONG_VERSION_NUMBER" in line or "record layer" in line or "wrong version" in line):
            return "it speaks no TLS: make redis.url one of redis://"
        # A server without TLS waits for the end of a line, and one with it hangs up.
        if is_tls:
            return "start it or correct redis.url; where it speaks no TLS, that is one of redis://"
        if "closed" in line or "reset" in line:
            return "start it or correct redis.url; where it speaks TLS, that is one of rediss://"
        return "start it or correct redis.url"


class _Login(CredentialProvider):
    """Asked by redis-py for each new connection."""

    def __init__(self, access: RedisAccess) -> None:
        self._access = access

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        access, password = self._access, self._access.password
        if access.password_file is not None:
            try:
                password = _password(access.password_file)
            except (OSError, ValueError) as error:  # on a host without the file, or in the middle of a change
                log.debug("redis.password_file: %s: %s", access.password_file, error)
        return (access.username, password) if access.username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _password(file: str) -> str:
    password = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    if not password:
        raise ValueError("is empty")
    return password


def _ca_data(file: str) -> str:
    """Raises ``ConfigError`` for a file that holds no CA."""
    try:
        content = Path(file).read_text(encoding="ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"redis.ca_certs: {file}: {_reason(error)}") from error
    return content


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

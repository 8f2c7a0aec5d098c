"""API keys from a file, as a mounted secret holds them, and the check of calls of gRPC."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from outrider.core.errors import ConfigError, Unauthenticated
from outrider.core.errors_wire import abort_with

log = logging.getLogger(__name__)

HEADER = "authorization"
# How the server does is no secret, and those that ask, such as Kubernetes, have no key.
OPEN_METHODS = f"/{health.SERVICE_NAME}/"


class ApiKeys:
    """The keys of a file, one a line; empty lines and those that begin with ``#`` are none.

    The file is read for each check, so that a key counts from the next request on, or does not any more. While it
    cannot be read, or holds no key, those that were read before hold: it may be in the middle of a change.
    """

    def __init__(self, file: str | Path) -> None:
        """Raises ``ConfigError`` for a file that cannot be read, or holds no key: nobody could come in."""
        self._file = Path(file)
        self._told = ""
        try:
            self._content = self._file.read_bytes()
            self._keys = _keys(self._content)
        except (OSError, ValueError) as error:
            raise ConfigError(f"router.api_key_file: {self._file}: {_reason(error)}") from error

    def admit(self, authorization: str) -> bool:
        """Whether the value of an ``Authorization`` header carries one of the keys. All are compared, in equal time."""
        self._refresh()
        scheme, _, given = authorization.partition(" ")
        offered = given.strip().encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(key, offered) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _refresh(self) -> None:
        try:
            content = self._file.read_bytes()
            if content != self._content:
                self._keys = _keys(content)
                self._content = content
                log.info("read %d API keys again", len(self._keys))
            self._told = ""
        except (OSError, ValueError) as error:
            if self._told != str(error):  # not with each request
                self._told = str(error)
                log.warning("API keys of %s: %s; those that were read before hold", self._file, _reason(error))


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls with a key through, and those of the health service; others end before their request is read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        # Of streams both ways, whatever the method is: such a handler may answer before anything was asked.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method.startswith(OPEN_METHODS) or self._keys.admit(_authorization(details)):
            return await continuation(details)
        return self._refusal


async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await abort_with(context, Unauthenticated(f"the call needs a valid key in its metadata: '{HEADER}: Bearer KEY'"))


def _authorization(details: grpc.HandlerCallDetails) -> str:
    """The first of them; empty where there is none."""
    metadata: Any = details.invocation_metadata or ()
    return next((value for name, value in metadata if name == HEADER and isinstance(value, str)), "")


def _keys(content: bytes) -> tuple[bytes, ...]:
    lines = [line.strip() for line in content.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not keys:
        raise ValueError("holds no key")
    return keys


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

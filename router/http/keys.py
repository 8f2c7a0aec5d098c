"""API keys from a file, as a mounted secret holds them."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from outrider.core.errors import ConfigError

log = logging.getLogger(__name__)


class ApiKeys:
    """The keys of a file, one a line; empty lines and those that begin with ``#`` are none. Read again on a change."""

    def __init__(self, file: str | Path) -> None:
        """Raises ``ConfigError`` for a file that cannot be read, or holds no key: nobody could come in."""
        self._file = Path(file)
        try:
            self._stamp, self._keys = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"router.api_key_file: {self._file}: {error}") from error

    def admit(self, authorization: str) -> bool:
        """Whether the value of an ``Authorization`` header carries one of the keys. All are compared, in equal time."""
        self._refresh()
        scheme, _, given = authorization.partition(" ")
        offered = given.strip().encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(key, offered) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _refresh(self) -> None:
        try:
            if self._stat() != self._stamp:
                self._stamp, self._keys = self._read()
                log.info("read %d API keys again", len(self._keys))
        except (OSError, ValueError) as error:  # in the middle of a change: what was read before holds
            log.warning("API keys of %s: %s", self._file, error)

    def _read(self) -> tuple[tuple[int, int, int], tuple[bytes, ...]]:
        stamp = self._stat()
        lines = [line.strip() for line in self._file.read_bytes().splitlines()]
        keys = tuple(line for line in lines if line and not line.startswith(b"#"))
        if not keys:
            raise ValueError("holds no key")
        return stamp, keys

    def _stat(self) -> tuple[int, int, int]:
        stat = self._file.stat()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

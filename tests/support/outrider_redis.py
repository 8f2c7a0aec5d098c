"""A redis-server that lets in who has a password, and one behind TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cluster import redis_server
from outrider.cluster.redis_server import RedisServer
from outrider_certificates import Files

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "p@ss/w:rd%"


class Guarded(RedisServer):
    """A redis-server with passwords for the default user and for alice; behind TLS where there are ``files`` for it."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        super().__init__(folder)
        self.files = files

    @property
    def url(self) -> str:
        return f"{'rediss' if self.files else 'redis'}://127.0.0.1:{self.port}/0"

    def _settings(self) -> str:
        lines = super()._settings() + f'requirepass "{PASSWORD}"\nuser alice on ">{PASSWORD}-2" ~* &* +@all\n'
        if self.files is None:
            return lines
        files = self.files
        tls = {"tls-cert-file": files.certificate, "tls-key-file": files.key, "tls-ca-cert-file": files.ca_certs}
        lines = lines.replace(f"port {self.port}\n", f"port 0\ntls-port {self.port}\ntls-auth-clients no\n")
        return lines + "".join(f'{name} "{file}"\n' for name, file in tls.items())

    def _answers_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.running():
            try:
                if f"process_id:{self.pid}\r\n" in self.command("INFO", "server"):
                    return True
            except OSError:
                pass
            time.sleep(0.02)
        return False

    def command(self, *words: str) -> str:
        """What it says to a command, in part at least."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10.0) as plain:
            connection: socket.socket = plain
            if self.files is not None:
                connection = ssl.create_default_context(cafile=self.files.ca_certs).wrap_socket(
                    plain, server_hostname="127.0.0.1"
                )
            connection.sendall(f"AUTH alice {PASSWORD}-2\r\n{' '.join(words)}\r\n".encode())
            said = b""
            while said.count(b"\r\n") < 2 or (b"$" in said and b"process_id:" not in said):
                part = connection.recv(1 << 16)
                if not part:
                    break
                said += part
            return said.decode()


def find_redis_with_tls() -> Path | str:
    """A redis-server that speaks TLS, or why there is none."""
    found = subprocess.run(
        [ROOT / "scripts" / "redis_tls.sh"], capture_output=True, text=True, timeout=120, check=False
    )
    return Path(found.stdout.strip()) if found.returncode == 0 else found.stderr.strip()


@contextlib.contextmanager
def guarded(folder: Path, *, with_tls: Path | None = None) -> Iterator[Guarded]:
    """One that runs; behind TLS where there is a program for that."""
    server = Guarded(folder, Files(folder / "tls") if with_tls is not None else None)
    with pytest.MonkeyPatch.context() as patch:
        if with_tls is not None:
            patch.setattr(redis_server, "find_redis_server", lambda: with_tls)
        server.start()
    try:
        yield server
    finally:
        server.stop()

"""Where a router is, what it takes to be let in, and why it was in vain."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from outrider.core.errors import ConfigError, OutriderError, Unauthenticated, Unavailable
from outrider.core.errors_wire import error_from_rpc

PROBE_S = 2.0

KEY_HINT = "give api_key (--api-key), or set OUTRIDER_API_KEY"
CA_HINT = "ca_certs (--ca-certs, OUTRIDER_CA_CERTS)"
CERT_HINT = "client_cert and client_key (--client-cert, --client-key)"


@dataclass(frozen=True)
class Endpoint:
    """A router, for ``Client`` and ``AsyncClient`` in place of an address. Raises ``ConfigError`` for what cannot be.

    Attributes:
        address: ``host:port``.
        ca_certs: a file of CAs in PEM. With it the connection is one of TLS, to a server whose certificate one of them
            signed; without it there is no TLS.
        api_key: one of the router's keys.
        client_cert: a file with the certificate (chain) to show to the router, in PEM; needs ``client_key``.
        client_key: a file with its key.
    """

    address: str
    ca_certs: str | None = None
    api_key: str | None = field(default=None, repr=False)
    client_cert: str | None = None
    client_key: str | None = None

    def __post_init__(self) -> None:
        if not self.address:
            raise ConfigError("no router is named: give host:port, or set OUTRIDER_ADDRESS")
        if (self.client_cert is None) != (self.client_key is None):
            raise ConfigError("client_cert and client_key need each other")
        if self.client_cert is not None and self.ca_certs is None:
            raise ConfigError(f"client_cert is of use with TLS only: give {CA_HINT} too")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key holds characters that no header may: use printable ASCII")

    @classmethod
    def named(
        cls,
        address: str | None = None,
        *,
        ca_certs: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        client_cert: str | os.PathLike[str] | None = None,
        client_key: str | os.PathLike[str] | None = None,
    ) -> Endpoint:
        """With the variables OUTRIDER_ADDRESS, OUTRIDER_CA_CERTS, OUTRIDER_API_KEY, OUTRIDER_CLIENT_CERT and
        OUTRIDER_CLIENT_KEY in place of what is not given."""

        def given(value: str | os.PathLike[str] | None, variable: str) -> str | None:
            return (os.fspath(value) if value else os.environ.get(variable)) or None

        return cls(
            given(address, "OUTRIDER_ADDRESS") or "",
            given(ca_certs, "OUTRIDER_CA_CERTS"),
            given(api_key, "OUTRIDER_API_KEY"),
            given(client_cert, "OUTRIDER_CLIENT_CERT"),
            given(client_key, "OUTRIDER_CLIENT_KEY"),
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key is not None else ()

    def open_channel(self, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """A connection, to be closed by who asked for it. Raises ``ConfigError`` for files that cannot be used."""
        if self.ca_certs is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, self._credentials(self.ca_certs), options=options)

    async def error_of(self, error: grpc.aio.AioRpcError) -> OutriderError:
        """The exception that a failed call stands for."""
        failed = error_from_rpc(error, address=self.address)
        if isinstance(failed, Unauthenticated):
            said = "wants an API key" if self.api_key is None else "does not know the API key that was given"
            return Unauthenticated(f"{self.address} {said}: {KEY_HINT}")
        line = error.details() or ""
        if not isinstance(failed, Unavailable) or "failed to connect" not in line:
            return failed
        if self.ca_certs is not None:
            reason = _tls_fault(line, self)
        else:
            reason = f"speaks TLS: give {CA_HINT}" if await speaks_tls(self.address) else None
        return ConfigError(f"{self.address} {reason}") if reason is not None else failed

    def _credentials(self, ca_certs: str) -> grpc.ChannelCredentials:
        """gRPC itself would say no more than that it cannot connect, so ssl looks at the files first."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        roots = _content("ca_certs", ca_certs)
        try:
            context.load_verify_locations(cadata=roots.decode("ascii"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"ca_certs: {ca_certs} holds no certificate in PEM: {error}") from error
        if self.client_cert is None or self.client_key is None:
            return grpc.ssl_channel_credentials(roots)
        chain, key = _content("client_cert", self.client_cert), _content("client_key", self.client_key)
        try:
            context.load_cert_chain(self.client_cert, self.client_key, lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(f"client_cert and client_key cannot be used: {error}") from error
        return grpc.ssl_channel_credentials(roots, key, chain)


def _content(name: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {file}: {error.strerror}") from error


def _tls_fault(line: str, endpoint: Endpoint) -> str | None:
    """What is wrong with TLS, after gRPC's own words; None where it is something else."""
    _, found, rest = line.partition("CERTIFICATE_VERIFY_FAILED:")
    if found:
        reason = rest.partition(":")[0].strip()
        return f"shows a certificate that {endpoint.ca_certs} does not vouch for ({reason}): see {CA_HINT}"
    if "Hostname Verification" in line or "not in peer certificate" in line:
        return "shows a certificate for other names: use one of them as address, or a certificate that names this one"
    if "WRONG_VERSION_NUMBER" in line:
        return f"speaks no TLS: leave out {CA_HINT}"
    if "Socket closed" in line or "reset" in line:
        shown = "a certificate" if endpoint.client_cert is None else "another certificate"
        return f"ended the TLS handshake: where it wants clients to show certificates, give {shown} by {CERT_HINT}"
    return None


async def speaks_tls(address: str) -> bool:
    """Whether who listens at ``host:port`` takes part in a handshake of TLS; False also where nobody does in time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is said there
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True

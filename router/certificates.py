"""The certificate of both doors, from files that whoever renews it writes anew."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from outrider.cluster.config import RouterConfig
from outrider.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Files:
    """What the files held: certificate chain, its key, and the CA of clients."""

    certificate: bytes
    key: bytes = field(repr=False)
    ca: bytes | None


@dataclass(frozen=True)
class _Loaded:
    files: _Files
    context: ssl.SSLContext
    configuration: grpc.ServerCertificateConfiguration


class Certificates:
    """Certificate, key and CA of a router. Each handshake looks at the files, so that the next connection gets what was
    renewed; those that are open go on.

    What cannot be used, such as a pair of which one half is written, changes nothing and is told in the log once. May
    be used from any thread: gRPC has its own.
    """

    def __init__(self, certfile: str | Path, keyfile: str | Path, ca_certs: str | Path | None = None) -> None:
        """With ``ca_certs``, clients must show a certificate that one of them signed.

        Raises ``ConfigError`` for files that cannot be used.
        """
        self._certfile, self._keyfile = Path(certfile), Path(keyfile)
        self._ca_certs = Path(ca_certs) if ca_certs is not None else None
        self._lock = threading.Lock()
        self._told: object = None  # the last content, or error, that was complained of
        self._loaded = self._load(self._read())

    @classmethod
    def of(cls, config: RouterConfig) -> Certificates | None:
        """Those that the settings name; None where they name none. Raises ``ConfigError``."""
        if config.ssl_certfile is None or config.ssl_keyfile is None:
            return None
        return cls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server."""
        known = self._loaded

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal known
            current = self._current()
            if current is known:
                return None
            known = current
            return current.configuration

        return grpc.dynamic_ssl_server_credentials(
            known.configuration,
            renewed,  # type: ignore[arg-type]  # the stubs do not know that None stands for no change
            require_client_authentication=self._ca_certs is not None,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """For any other server. Where clients show certificates it speaks TLS 1.3 alone."""
        context = self._context(self._loaded.files)

        def use_current(connection: ssl.SSLObject, *_: object) -> None:
            connection.context = self._current().context

        # Called in each handshake, also of clients that send no name.
        context.sni_callback = use_current
        if self._ca_certs is not None:
            # A session that is resumed shows no certificate again, which may have lost its CA since. TLS 1.2 resumes
            # without tickets too, by an id.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        return context

    def _current(self) -> _Loaded:
        with self._lock:
            try:
                files = self._read()
                if files != self._loaded.files and files != self._told:
                    self._loaded = self._load(files)
                    log.info("read the certificate %s again", self._certfile)
                if files == self._loaded.files:
                    self._told = None
            except _Unreadable as error:
                self._complain(error, str(error))
            except ConfigError as error:
                self._complain(error, files)
            return self._loaded

    def _complain(self, error: ConfigError, about: object) -> None:
        if self._told != about:
            self._told = about
            log.error("%s; the certificate that was read before stays in use", error)

    def _read(self) -> _Files:
        ca = self._ca_certs
        return _Files(
            certificate=_content("router.ssl_certfile", self._certfile),
            key=_content("router.ssl_keyfile", self._keyfile),
            ca=_content("router.ssl_ca_certs", ca) if ca is not None else None,
        )

    def _load(self, files: _Files) -> _Loaded:
        context = self._context(files)
        configuration = grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.ca)
        return _Loaded(files, context, configuration)

    def _context(self, files: _Files) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            with _in_memory(files.certificate) as certificate, _in_memory(files.key) as key:
                context.load_cert_chain(certificate, key, _no_password)
        except (OSError, ValueError) as error:  # ssl's own errors are of the former kind
            raise ConfigError(
                f"router.ssl_certfile: {self._certfile} with the key {self._keyfile} cannot be used: {error}"
            ) from error
        if files.ca is not None:
            try:
                context.load_verify_locations(cadata=files.ca.decode("ascii"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"router.ssl_ca_certs: {self._ca_certs} cannot be used: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class _Unreadable(ConfigError):
    """A file cannot be read."""


def _content(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _Unreadable(f"{name}: cannot read {file}: {error.strerror}") from error


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path of bytes that were read once: ssl takes paths alone, and what lies on disk may change in between."""
    with os.fdopen(os.memfd_create("outrider-tls"), "wb") as memory:
        memory.write(content)
        memory.flush()
        yield f"/proc/self/fd/{memory.fileno()}"


def _no_password() -> str:
    raise ValueError("the key is behind a password, which nobody could enter here; give one that is not")

"""Certificates of a test, and what somebody listens with."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import trustme


class Files:
    """A folder with ``tls.crt``, ``tls.key`` and ``ca.crt``, as a mounted secret of Kubernetes has them."""

    def __init__(self, folder: Path, ca: trustme.CA | None = None, *names: str) -> None:
        """``names``: of the certificate; without any it is for 127.0.0.1."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.certificate, self.key, self.ca_certs = (folder / name for name in ("tls.crt", "tls.key", "ca.crt"))
        self.ca = ca or trustme.CA()
        self.write(self.ca_certs, self.ca.cert_pem.bytes())
        self.renew(*names)

    @staticmethod
    def write(file: Path, content: bytes) -> None:
        """In one move."""
        new = file.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, file)

    def issue(self, *names: str) -> trustme.LeafCert:
        return self.ca.issue_cert(*(names or ("127.0.0.1",)))

    def renew(self, *names: str) -> bytes:
        """A certificate of the same CA in place of that before; answers it in DER, as a handshake shows it."""
        leaf = self.issue(*names)
        self.write(self.certificate, b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        self.write(self.key, leaf.private_key_pem.bytes())
        return shown(leaf)

    @property
    def router(self) -> dict[str, str]:
        """As settings of a router."""
        return {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}

    @property
    def shown(self) -> dict[str, str]:
        """As arguments of a client that shows the certificate."""
        return {"client_cert": str(self.certificate), "client_key": str(self.key)}


def shown(leaf: trustme.LeafCert) -> bytes:
    """The certificate in DER."""
    return ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode())


async def served_at(port: int, ca_certs: Path, timeout_s: float = 30.0) -> bytes:
    """The certificate, in DER, that who listens at a port of this machine shows to a new connection."""
    context = ssl.create_default_context(cafile=ca_certs)
    context.set_alpn_protocols(["h2"])  # gRPC hangs up on others
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert certificate is not None
        return bytes(certificate)
    finally:
        writer.transport.abort()

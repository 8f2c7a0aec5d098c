"""What stand-in servers have in common: they listen on a free port, and die at once."""

from __future__ import annotations

import abc
from typing import Any, Self

import grpc


class StandInServer(abc.ABC):
    """A gRPC server on the loopback address; use it as an async context manager.

    Attributes:
        address, port: where it listens; set by ``start``.
    """

    address: str = ""
    port: int = 0
    _server: Any = None

    @abc.abstractmethod
    def _register(self, server: Any) -> None:
        """Add this object's service to a server."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen on a free port (on the same one again after ``stop``)."""
        self._server = grpc.aio.server()
        self._register(self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.address = f"127.0.0.1:{self.port}"
        await self._server.start()

    async def stop(self) -> None:
        """Die at once: streams break."""
        await self._server.stop(None)

"""Integers from rank 0 to the other ranks over plain sockets.

A collective would either spin while nothing is to be done or cost milliseconds on gloo, and would give up at its
group's timeout. A socket sleeps, wakes in tens of microseconds, waits as long as it is told, and ends when its peer
dies.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from array import array
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from outrider.core.errors import GroupError

_KEY = "outrider/channel"
_HELLO = struct.Struct("<32sI")  # secret, rank
_LENGTH = struct.Struct("<Q")
# Whoever connects and says nothing for so long is a stranger; the others wait meanwhile.
_HELLO_S = 10.0


class Channel:
    """Star of TCP connections around rank 0, opened through a store that all ranks share."""

    def __init__(self, store: Store, rank: int, world_size: int, host: str, timeout_s: float) -> None:
        """``host``: the address of rank 0 that the others reach. Raises ``GroupError`` if some rank does not come."""
        self._rank = rank
        deadline = time.monotonic() + timeout_s
        try:
            self._peers = (
                self._accept(store, world_size, host, deadline) if rank == 0 else [_join(store, rank, deadline)]
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise GroupError(f"rank {rank} could not open its control connection: {error}") from error

    def _accept(self, store: Store, world_size: int, host: str, deadline: float) -> list[socket.socket]:
        secret = secrets.token_bytes(32)
        peers: dict[int, socket.socket] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=world_size) as listener:
            store.set(_KEY, f"{secret.hex()} {listener.getsockname()[1]} {host}")
            while len(peers) < world_size - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                peer, _ = listener.accept()
                peer.settimeout(min(max(0.01, deadline - time.monotonic()), _HELLO_S))
                try:
                    given, rank = _HELLO.unpack(_receive(peer, _HELLO.size))
                except OSError:
                    peer.close()  # it went, or is silent
                    continue
                if not hmac.compare_digest(given, secret) or not 0 < rank < world_size or rank in peers:
                    peer.close()  # a stranger on the port
                    continue
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peers[rank] = peer
        return [peers[rank] for rank in sorted(peers)]

    def broadcast(self, values: Sequence[int] | None, timeout_s: float | None) -> list[int]:
        """Rank 0 gives 64-bit integers and gets them back; the others give None and wait for them."""
        try:
            if self._rank == 0:
                if values is None:
                    raise GroupError("rank 0 must give the integers to broadcast")
                data = array("q", values)
                message = _LENGTH.pack(len(data)) + data.tobytes()
                for peer in self._peers:
                    peer.settimeout(timeout_s)
                    peer.sendall(message)
                return data.tolist()
            (peer,) = self._peers
            peer.settimeout(timeout_s)
            (length,) = _LENGTH.unpack(_receive(peer, _LENGTH.size))
            received = array("q")
            received.frombytes(_receive(peer, length * received.itemsize))
            return received.tolist()
        except OSError as error:
            raise GroupError(
                f"rank {self._rank} lost its control connection: {error or type(error).__name__}"
            ) from error

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._peers = []


def _join(store: Store, rank: int, deadline: float) -> socket.socket:
    secret, port, host = store.get(_KEY).decode().split()
    peer = socket.create_connection((host, int(port)), timeout=max(0.01, deadline - time.monotonic()))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(_HELLO.pack(bytes.fromhex(secret), rank))
    return peer


def _receive(peer: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    got = 0
    while got < num_bytes:
        count = peer.recv_into(view[got:])
        if count == 0:
            raise ConnectionError("the other end is gone")
        got += count
    return data

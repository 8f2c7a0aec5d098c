"""Who of a group is alive: one TCP connection from each rank to the leader, beside the collectives.

A collective whose partner died may wait for minutes, or spin for ever in shared memory. The kernel closes the
connections of a dead process at once, and a host that vanished falls silent; either way every rank hears of it here,
in a thread of its own, and stops.
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import GroupError

log = logging.getLogger(__name__)

_BEAT = {"beat": True}
# Whoever connects and says nothing for so long is a stranger; the others wait meanwhile.
_HELLO_S = 10.0


class _Peer:
    """One connection. Messages are JSON objects, one a line."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self.heard = time.monotonic()
        self._buffer = b""
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Raises ``OSError`` where the peer does not take it: the few bytes of a beat always fit, or it is stuck."""
        with self._lock:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What arrived; waits for something. None: the peer is gone."""
        data = self.connection.recv(65536)
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_one(self) -> dict[str, Any]:
        while True:
            messages = self.receive()
            if messages is None:
                raise OSError("the connection was closed")
            if messages:
                return messages[0]


@dataclass(frozen=True)
class _Ending:
    message: str | None  # None: in peace


class Liveness:
    """Watches the other ranks (leader) or the leader (others) from ``start`` on.

    One of the callbacks is called, once, from the watching thread: ``on_loss`` with a line that says who was lost or
    what it reported, ``on_leave`` where the leader ended the group in peace. A rank that leaves the leader is a loss.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        on_loss: Callable[[str], None],
        on_leave: Callable[[], None],
        *,
        beat_s: float = 1.0,
        silence_s: float = 10.0,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._on_loss = on_loss
        self._on_leave = on_leave
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._listener: socket.socket | None = None
        self._peers: list[_Peer] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"liveness-{rank}", daemon=True)

    def listen(self, host: str) -> int:
        """Leader: the port that the others connect to."""
        self._listener = socket.create_server((host, 0))
        port: int = self._listener.getsockname()[1]
        return port

    def accept(self, token: int, hello: dict[str, Any], deadline_s: float) -> list[dict[str, Any]]:
        """Leader: wait for every other rank; what each said of itself, by rank, this one's ``hello`` first.

        ``token`` tells the group's own ranks from strangers. Raises ``GroupError`` when some do not come in time.
        """
        if self._listener is None:
            raise GroupError("accept needs listen first")
        found = {0: {**hello, "rank": 0}}
        end = time.monotonic() + deadline_s
        with self._listener as listener:
            while len(found) < self._world_size:
                listener.settimeout(max(end - time.monotonic(), 0.01))
                connection = None
                try:
                    connection, _ = listener.accept()
                    connection.settimeout(min(max(end - time.monotonic(), 0.01), _HELLO_S))
                    peer = _Peer(connection, -1)
                    said = peer.receive_one()
                except (OSError, ValueError) as error:
                    if connection is not None:
                        connection.close()
                    if time.monotonic() < end:
                        continue  # a stranger, or a rank that will try again
                    missing = sorted(set(range(self._world_size)) - set(found))
                    raise GroupError(f"ranks {missing} did not reach the leader within {deadline_s:g} s") from error
                ours = isinstance(said, dict) and said.get("token") == token
                if not ours or not 0 < said.get("rank", 0) < self._world_size:
                    connection.close()
                    continue
                peer.rank = said["rank"]
                peer.send({"welcome": True})
                del said["token"]
                found[peer.rank] = said
                self._peers.append(peer)
        self._listener = None
        return [found[rank] for rank in range(self._world_size)]

    def connect(self, host: str, port: int, token: int, hello: dict[str, Any], deadline_s: float) -> None:
        """Another rank: join the leader. Raises ``GroupError`` when it does not answer in time."""
        try:
            connection = socket.create_connection((host, port), timeout=deadline_s)
            peer = _Peer(connection, 0)
            peer.send({**hello, "rank": self._rank, "token": token})
            peer.receive_one()
        except (OSError, ValueError) as error:
            raise GroupError(f"rank {self._rank} does not reach the leader at {host}:{port}: {error}") from error
        self._peers = [peer]

    def start(self) -> None:
        for peer in self._peers:
            peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.connection.settimeout(self._beat_s)
            peer.heard = time.monotonic()
        self._thread.start()

    def fail(self, message: str) -> None:
        """Tell every peer that this rank cannot go on. Their ``on_loss`` gets the message."""
        self._tell({"failed": message})

    def close(self) -> None:
        """Leave. Safe to call twice."""
        if not self._closing.is_set():
            self._tell({"bye": True})
            self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._beat_s)
        for peer in self._peers:
            peer.connection.close()
        if self._listener is not None:
            self._listener.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            try:
                peer.send(message)
            except OSError as error:
                log.debug("rank %d could not be told: %s", peer.rank, error)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            next_beat = time.monotonic()
            while not self._closing.is_set():
                ending = None
                for key, _ in selector.select(timeout=self._beat_s / 4):
                    ending = ending or self._hear(key.data)
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + self._beat_s
                    self._tell(_BEAT)
                for peer in self._peers:
                    if now - peer.heard > self._silence_s:
                        ending = ending or _Ending(f"rank {peer.rank} was silent for {self._silence_s:g} s")
                if ending is not None and not self._closing.is_set():
                    if ending.message is None:
                        self._on_leave()
                    else:
                        self._on_loss(ending.message)
                    return

    def _hear(self, peer: _Peer) -> _Ending | None:
        """How the group ends for this rank, if it does."""
        try:
            messages = peer.receive()
        except TimeoutError:
            return None
        except OSError as error:
            return _Ending(f"rank {peer.rank} was lost: {error.strerror or error}")
        except ValueError as error:
            return _Ending(f"rank {peer.rank} sent what is no message: {error}")
        if messages is None:
            return _Ending(f"rank {peer.rank} was lost: its process ended")
        for message in messages:
            if "failed" in message:
                return _Ending(str(message["failed"]))
            if "bye" in message:
                return _Ending(None if peer.rank == 0 else f"rank {peer.rank} left the group")
        return None

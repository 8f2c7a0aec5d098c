"""Ports that a test names before anybody listens there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that no stranger gets meanwhile: connections to it are refused, until somebody who is told of it listens
    there with SO_REUSEADDR, as servers do.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])

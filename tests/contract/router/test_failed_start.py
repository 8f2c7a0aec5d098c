"""A router that cannot start."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.errors import ConfigError
from outrider.router.server import RouterServer


async def test_it_leaves_nothing_open_and_nobody_else_out(world: Any) -> None:
    first = await world.router(wait=False)
    port = int(first.address.rpartition(":")[2])
    server = RouterServer(world.config(router={"port": port, "metrics_port": 0}), world.redis_url, router_id="router-0")
    await world.registry.announce("router", "router-0", first._record())
    with pytest.raises(ConfigError, match=f"router.port: 127.0.0.1:{port} is taken"):
        await server.start()
    for door in (server._http, server._listener):
        assert door is not None
        assert door._socket is not None
        assert door._socket.fileno() == -1
    with pytest.raises(RuntimeError, match="shutdown"):
        await server._grammars.run(lambda: None)
    assert (await world.registry.members("router"))["router-0"]["address"] == first.address

"""What a supervisor does while its cluster serves: it watches the parts, and starts again what has ended."""

from __future__ import annotations

import asyncio
from functools import partial

from outrider.cluster.keeper import keep
from outrider.cluster.parts import ClusterParts, need
from outrider.cluster.waiting import all_or_first_error
from outrider.core.errors import Unavailable

POLL_S = 0.25


async def keep_up(parts: ClusterParts) -> None:
    """Watch every part that was started. Ends by no error of ours: cancel it."""
    report = parts.reporter.progress
    keepers = [
        keep("the target group", need(parts.group).watch, parts.build_group, report),
        parts.keeping_drafts or need(parts.drafts).keep(),
    ]
    if parts.router is not None:
        keepers.append(keep("the router", parts.router.watch, partial(restart_router, parts), report))
    if parts.redis is not None:
        keepers.append(keep("redis-server", partial(_watch_redis, parts), partial(_restart_redis, parts), report))
    await all_or_first_error(*keepers)


async def restart_router(parts: ClusterParts) -> None:
    """Start the router in the place of one that may still run. Raises ``OutriderError``."""
    router = need(parts.router)
    await router.stop()  # of two with the same ports and name neither would serve
    router.launch()
    parts.remember()
    await router.wait_registered(need(parts.registry), timeout_s=None)
    parts.remember(router_address=router.address, router_metrics_url=router.metrics_url)
    parts.reporter.progress(f"the router listens on {router.address} again")


async def _watch_redis(parts: ClusterParts) -> None:
    while True:
        if not need(parts.redis).running():
            raise Unavailable("redis-server ended")
        await asyncio.sleep(POLL_S)


async def _restart_redis(parts: ClusterParts) -> None:
    server = need(parts.redis)
    await asyncio.to_thread(server.start, port=server.port)
    parts.remember()

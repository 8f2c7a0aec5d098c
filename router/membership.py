"""Who is there, as the registry says: a view that follows it and survives when Redis does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from outrider.cluster.registry import Kind, Record, Registry
from outrider.core.errors import Unavailable

log = logging.getLogger(__name__)


async def follow_members(registry: Registry, kind: Kind, poll_s: float) -> AsyncIterator[dict[str, Record]]:
    """Yields the members of a kind at first and whenever they change.

    While Redis does not answer, what was known last stays: streams to living processes need no Redis.
    """
    known: dict[str, Record] | None = None
    reachable = True
    while True:
        try:
            members = await registry.members(kind)
            if not reachable:
                log.info("Redis answers again")
            reachable = True
            if members != known:
                known = members
                yield members
        except Unavailable as error:
            if reachable:
                log.warning("%s; going on with the members known", error)
            reachable = False
        await asyncio.sleep(poll_s)

"""The right to schedule for a group: a fenced lease in the registry, so that a group never has two schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from outrider.cluster.registry import Registry
from outrider.core.errors import Unavailable

log = logging.getLogger(__name__)


class GroupLease:
    """One group's lease for one owner: ``acquire``, then ``keep`` as a task, then ``release``."""

    def __init__(
        self, registry: Registry, group_id: str, owner: str, *, may_claim: Callable[[], bool] = lambda: True
    ) -> None:
        """``may_claim``: while it says no, ``acquire`` leaves the lease to others."""
        self.group_id = group_id
        self._may_claim = may_claim
        self._registry = registry
        self._owner = owner
        self._token: int | None = None

    @property
    def _pause_s(self) -> float:
        return self._registry.ttl_s / 3

    async def acquire(self) -> None:
        """Wait until nobody else owns the group, then own it."""
        waiting = False
        while True:
            try:
                if self._may_claim():
                    self._token = await self._registry.claim_group(self.group_id, self._owner)
                if self._token is not None:
                    log.info("owner of group %s with token %d", self.group_id, self._token)
                    return
                if not waiting:
                    log.info("group %s is owned by another router; waiting for its lease to end", self.group_id)
                waiting = True
            except Unavailable as error:
                log.warning("%s", error)
            await asyncio.sleep(self._pause_s)

    async def keep(self, lost: Callable[[str], None]) -> None:
        """Renew the lease for as long as it can be; then call ``lost`` with the reason and acquire it again.

        While Redis does not answer nobody else can claim the group either, so its owner goes on.
        """
        while True:
            await asyncio.sleep(self._pause_s)
            try:
                if self._token is not None and await self._registry.renew_group(
                    self.group_id, self._owner, self._token
                ):
                    continue
                # It ran out, or Redis forgot it; if nobody took it meanwhile, nothing happened.
                self._token = await self._registry.claim_group(self.group_id, self._owner)
            except Unavailable as error:
                log.debug("%s", error)
                continue
            if self._token is None:
                lost(f"another router owns group {self.group_id} now")
                await self.acquire()

    async def confirm(self) -> bool:
        """Whether the group is ours still; where Redis does not answer, nobody else can have claimed it."""
        token = self._token
        try:
            return token is not None and await self._registry.renew_group(self.group_id, self._owner, token)
        except Unavailable as error:
            log.debug("%s", error)
            return True

    @property
    def is_held(self) -> bool:
        return self._token is not None

    @property
    def token(self) -> int | None:
        return self._token

    async def release(self) -> None:
        """Give the group up, if it is ours. Does not raise."""
        token, self._token = self._token, None
        if token is not None:
            with contextlib.suppress(Unavailable):  # it runs out by itself
                await self._registry.release_group(self.group_id, self._owner, token)

"""The way to the owner of the group: this process where it holds the lease, else the router that says it does."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from outrider.cluster.registry import Record, Registry
from outrider.core.errors import Conflict, DeadlineExceeded, OutriderError, Unavailable
from outrider.core.plan import GroupInfo
from outrider.router.group_service import GroupOwner, LocalGroup
from outrider.router.membership import follow_members
from outrider.router.remote_group import NotHere, RemoteGroup
from outrider.router.requests import NewRequest
from outrider.router.transcript import Update

log = logging.getLogger(__name__)

RETRY_S = 0.05
MAX_WAIT_S = 240.0  # of one request for an owner that takes it: a drain of two minutes, and what comes after it


class Owners(Protocol):
    """What a frontend needs: whoever owns the group at the time."""

    @property
    def info(self) -> GroupInfo | None: ...

    async def submit(self, request: NewRequest) -> tuple[GroupOwner, Update]:
        """As ``Group.submit``; also tells whom to watch the request at."""
        ...

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool: ...


class GroupRoute:
    """Follows who owns the group. ``run`` it as a task; ``end`` and ``aclose`` it in the end."""

    def __init__(
        self,
        local: LocalGroup | None,
        registry: Registry,
        *,
        router_id: str,
        poll_s: float,
        takeover_s: float,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        """``takeover_s``: how long new requests wait for the next owner, from when the last one was heard of.
        ``max_wait_s``: how long each waits at most, also for one that is heard but drains.
        """
        self._local = local
        self._registry = registry
        self._router_id = router_id
        self._poll_s = poll_s
        self._takeover_s = takeover_s
        self._max_wait_s = max_wait_s
        self._remote: RemoteGroup | None = None
        self._remote_token = 0
        self._following: asyncio.Task[None] | None = None
        self._heard_at: float | None = None  # when there was an owner that takes requests or drains
        self._ended: OutriderError | None = None

    @property
    def info(self) -> GroupInfo | None:
        """What the group is, as far as is known; None before the first target was attached."""
        owner = self._local if self._is_local else self._remote
        return owner.info if owner is not None else None

    @property
    def state(self) -> str:
        """ "ready", or why requests would not be answered."""
        if self._local is not None and (self._is_local or self._remote is None):
            return self._local.state
        return self._remote.state if self._remote is not None else "waiting for the router that owns the group"

    @property
    def remote(self) -> RemoteGroup | None:
        """The group in another router, where that is its owner."""
        return None if self._is_local else self._remote

    async def run(self) -> None:
        """Follow the owner until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._remember(), name="owner heard")
            async for routers in follow_members(self._registry, "router", self._poll_s):
                owners = [r for i, r in routers.items() if i != self._router_id and r.get("group_token")]
                await self._choose(max(owners, key=lambda record: record["group_token"], default=None))

    async def _remember(self) -> None:
        while True:
            self._owner()
            await asyncio.sleep(self._poll_s)

    async def submit(self, request: NewRequest) -> tuple[GroupOwner, Update]:
        """Queue a request at the owner. While the group changes hands it waits for the next owner.

        Raises what ``Group.submit`` does, and ``DeadlineExceeded``.
        """
        may_be_there = False
        began = time.monotonic()
        while True:
            if self._ended is not None:
                raise self._ended
            owner = self._owner()
            try:
                if owner is not None and not self._drains(owner):
                    return owner, await owner.submit(request)
                state = self.state if owner is None else "the router that owns it is shutting down"
                refused = Unavailable(f"no router takes requests for the group ({state}); try again later")
            except NotHere as error:
                refused, may_be_there = error, True
            except Conflict as error:
                if not may_be_there:
                    raise
                refused = Unavailable(str(error))  # its own first try, which nobody watches: that ends soon
            except Unavailable as error:
                if owner is not self._local or self._is_local:
                    raise
                refused = error  # the group was lost at that moment
            self._check_patience(request, began, refused)
            await asyncio.sleep(RETRY_S)

    async def abort(self, request_id: str, reason: str, generation: int = 0) -> bool:
        """End a request at the owner; False if it is not known there."""
        owner = self._owner()
        return owner is not None and await owner.abort(request_id, reason, generation)

    def end(self, error: OutriderError) -> None:
        """Whatever waits for another process raises ``error``, now and from now on."""
        self._ended = self._ended or error
        if self._remote is not None:
            self._remote.end(error)

    async def aclose(self) -> None:
        await self._choose(None)
        await self._leave()

    @property
    def _is_local(self) -> bool:
        return self._local is not None and self._local.is_owned and (self._local.token or 0) > self._remote_token

    def _owner(self) -> GroupOwner | None:
        """Who can be asked now."""
        owner: GroupOwner | None
        is_local, local, remote = self._is_local, self._local, self._remote
        if is_local or remote is None:
            # Without a target it can refuse only: that is an answer, unless the group has just changed hands.
            owner = local if local is not None and (local.info is not None or self._heard_at is None) else None
            is_heard = is_local and owner is not None and owner.info is not None
        else:
            owner, is_heard = (remote if remote.is_owner else None), remote.is_owner
        if is_heard:
            self._heard_at = time.monotonic()
        return owner

    def _drains(self, owner: GroupOwner) -> bool:
        remote = self._remote
        return remote is not None and owner is remote and remote.is_draining

    def _check_patience(self, request: NewRequest, began: float, refused: Unavailable) -> None:
        now = time.monotonic()
        is_lost = self._heard_at is None or now - self._heard_at > self._takeover_s
        if is_lost or now - began > self._max_wait_s:
            raise Unavailable(str(refused))
        if request.deadline is not None and now > request.deadline:
            raise DeadlineExceeded(f"request {request.request_id} ran out of time: no router took it in meanwhile")

    async def _choose(self, record: Record | None) -> None:
        """Follow the router of a record. Where there is none, the last one is heard to its end."""
        token = record["group_token"] if record is not None else 0
        own = self._local.token if self._local is not None and self._local.is_owned else None
        if own is not None and own > token:
            self._remote_token = 0
            await self._leave()
            return
        self._remote_token = token
        if record is None or (self._remote is not None and self._remote.address == record["group_address"]):
            return
        await self._leave()
        log.info("router %s at %s owns the group", record["router_id"], record["group_address"])
        self._remote = RemoteGroup(record["group_address"])
        self._following = asyncio.create_task(self._remote.follow(), name="follow owner")

    async def _leave(self) -> None:
        remote, self._remote = self._remote, None
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        if remote is not None:
            await remote.aclose()

"""Finding a group's target in the registry, owning the group, attaching, and attaching again whenever that breaks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from outrider.cluster.registry import Record, Registry
from outrider.core.errors import ConfigError, GroupError, Unavailable
from outrider.core.logs import bind
from outrider.core.plan import GroupInfo
from outrider.router.lease import GroupLease
from outrider.router.membership import follow_members
from outrider.router.target_stream import TargetStream

log = logging.getLogger(__name__)

Serve = Callable[[TargetStream, GroupInfo], Awaitable[None]]


@dataclass(frozen=True)
class AttachmentSettings:
    """Times, in seconds.

    Attributes:
        attach_timeout_s: time that attaching may take.
        grace_s: how long a lost target may take to come back before it is given up.
        poll_s: how often the registry is read.
        retry_s: pause before a target is tried again.
    """

    attach_timeout_s: float = 10.0
    grace_s: float = 60.0
    poll_s: float = 0.25
    retry_s: float = 0.2


class TargetAttachment:
    """The stream to the target of one group, made anew as long as ``run`` runs.

    Attributes:
        state: "waiting for a target", "ready", "lost: ..." or "refused: ...".
        record: what the registry says of the attached target, or of the last one.
        stream: the stream while a target is attached.
    """

    def __init__(
        self,
        registry: Registry,
        settings: AttachmentSettings,
        *,
        scheduler_id: str,
        disowned: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``disowned`` is called with the reason when another router has become the group's owner."""
        self.state = "waiting for a target"
        self.record: Record = {}
        self.stream: TargetStream | None = None
        self._registry = registry
        self._settings = settings
        self._scheduler_id = scheduler_id
        self._disowned = disowned
        self._resigned = False
        self._lost_at = time.monotonic()
        self._newest: Record | None = None
        self._min_epoch = 0  # records of an older epoch are of groups that failed
        self._lease: GroupLease | None = None
        self._changed = asyncio.Event()

    @property
    def is_given_up(self) -> bool:
        """Whether no target has been there for longer than the grace time."""
        return self.stream is None and time.monotonic() - self._lost_at > self._settings.grace_s

    @property
    def is_owned(self) -> bool:
        """Whether this process has the right to schedule for the group."""
        return self.token is not None

    @property
    def token(self) -> int | None:
        """The fencing token of the lease: of two that think they own the group, the larger one does."""
        return self._lease.token if self._lease is not None else None

    @property
    def group_id(self) -> str:
        return self._lease.group_id if self._lease is not None else ""

    def resign(self) -> None:
        """Do not become the group's owner any more; who is it stays it."""
        self._resigned = True

    async def run(self, serve: Serve) -> None:
        """Attach, and run ``serve`` until it raises; then attach again. Ends when cancelled.

        ``serve`` raises ``Unavailable`` if the stream broke, ``GroupError`` if the group cannot go on (then the next
        epoch is waited for), ``ConfigError`` if the target does not fit.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name="follow target")
                await self._own(await self._next_record(), tasks)
                while True:
                    await self._attach(serve)
                    await asyncio.sleep(self._settings.retry_s)
        finally:
            self.state = "stopped"
            if self._lease is not None:
                await self._lease.release()

    async def _own(self, record: Record, tasks: asyncio.TaskGroup) -> None:
        lease = GroupLease(self._registry, record["group_id"], self._scheduler_id, may_claim=lambda: not self._resigned)
        await lease.acquire()
        self._lease = lease
        tasks.create_task(lease.keep(self._lose), name="lease")

    async def _attach(self, serve: Serve) -> None:
        record = await self._next_record()
        if self._lease is not None and not await self._lease.confirm():
            return  # a process that was stopped for a while must not take the target from the new owner
        bind(epoch=record["epoch"])
        stream = TargetStream(record["address"], scheduler_id=self._scheduler_id, epoch=record["epoch"])
        try:
            info = await stream.attach(self._settings.attach_timeout_s)
            self.stream, self.record = stream, record
            await serve(stream, info)
        except Unavailable as error:
            self._lost(f"lost: {error}")
        except ConfigError as error:
            self._lost(f"refused: {error}")
        except GroupError as error:
            self._min_epoch = record["epoch"] + 1
            self._lost(f"lost: {error}")
        finally:
            self.stream = None
            await stream.close()

    def _lost(self, state: str) -> None:
        if self.state == "ready":
            self._lost_at = time.monotonic()
        if state != self.state:
            log.warning("target %s", state)
        self.state = state

    def _lose(self, reason: str) -> None:
        self._lost(f"lost: {reason}")
        self._end_stream(reason)
        self._disowned(reason)

    def _end_stream(self, reason: str) -> None:
        if self.stream is not None:
            self.stream.end(reason)

    async def _follow(self) -> None:
        async for records in follow_members(self._registry, "target", self._settings.poll_s):
            group_id = self._lease.group_id if self._lease is not None else None
            fitting = [record for record in records.values() if group_id in (None, record["group_id"])]
            if not fitting:
                continue
            newest = min(fitting, key=lambda record: (record["group_id"], -record["epoch"]))
            self._newest = newest
            if self.stream is not None and newest["epoch"] > self.stream.epoch:
                self._end_stream(f"epoch {newest['epoch']} of group {newest['group_id']} has taken over")
            self._changed.set()

    async def _next_record(self) -> Record:
        """The newest record that may be attached to, once there is one and the group is ours."""
        while True:
            self._changed.clear()
            if self._lease is None or self._lease.is_held:
                if self._newest is not None and self._newest["epoch"] >= self._min_epoch:
                    return self._newest
                await self._changed.wait()
            else:
                await asyncio.sleep(self._settings.poll_s)

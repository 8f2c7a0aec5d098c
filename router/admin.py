"""What operators call: status, live settings and profiles."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from outrider.core.errors import Unavailable
from outrider.core.errors_wire import errors_as_status
from outrider.router.group import Group
from outrider.router.live_settings import SettingsFollower
from outrider.router.overhead import Overhead, Quantiles
from outrider.router.profile_wire import profile_settings, profile_to_wire
from outrider.router.profiler import Progress
from outrider.router.remote_group import RemoteGroup
from outrider.router.snapshots import SpeculationSnapshot
from outrider.v1 import admin_pb2, admin_pb2_grpc, group_pb2

log = logging.getLogger(__name__)

PROFILE_TIMEOUT_S = 3600.0  # where the caller names none
REPLY_S = 0.5  # what a caller's time is cut by, so that it hears why it ran out

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Answers for one router and the group that it owns."""

    def __init__(
        self,
        group: Group,
        settings: SettingsFollower,
        *,
        cluster: str,
        router_id: str,
        http_url: str = "",
        remote: Callable[[], RemoteGroup | None] = lambda: None,
    ) -> None:
        """``remote``: the group in another router, where that owns it."""
        self._group = group
        self._remote = remote
        self._settings = settings
        self._cluster = cluster
        self._router_id = router_id
        self._http_url = http_url
        self._started = time.monotonic()

    async def Status(  # noqa: N802
        self, request: admin_pb2.StatusRequest, context: _Context
    ) -> admin_pb2.StatusResponse:
        async with errors_as_status(context, log, "status"):
            remote = self._remote()
            described = describe(self._group) if remote is None else await remote.describe()
            return admin_pb2.StatusResponse(
                cluster=self._cluster,
                router_id=self._router_id,
                groups=[described.group],
                drafts=described.drafts,
                queued=described.queued,
                running=described.running,
                settings=self._settings.current.to_wire(),
                uptime_s=time.monotonic() - self._started,
                http_url=self._http_url,
            )

    async def GetSettings(  # noqa: N802
        self, request: admin_pb2.GetSettingsRequest, context: _Context
    ) -> admin_pb2.GetSettingsResponse:
        async with errors_as_status(context, log, "get settings"):
            await self._settings.refresh()
            return admin_pb2.GetSettingsResponse(settings=self._settings.current.to_wire())

    async def UpdateSettings(  # noqa: N802
        self, request: admin_pb2.UpdateSettingsRequest, context: _Context
    ) -> admin_pb2.UpdateSettingsResponse:
        async with errors_as_status(context, log, "update settings"):
            settings = await self._settings.update(request.settings)
            return admin_pb2.UpdateSettingsResponse(settings=settings.to_wire())

    async def Profile(  # noqa: N802
        self, request: admin_pb2.ProfileRequest, context: _Context
    ) -> AsyncIterator[admin_pb2.ProfileResponse]:
        async with errors_as_status(context, log, "profile"):
            if (remote := self._remote()) is not None:
                owner = f"the router whose group port is {remote.address}"
                raise Unavailable(f"this router does not own the group, so it cannot measure it: ask {owner}")
            remaining = context.time_remaining()
            timeout_s = PROFILE_TIMEOUT_S if remaining is None else max(0.05, remaining - REPLY_S)
            running = self._group.profiler.run(profile_settings(request), timeout_s)
            async with contextlib.aclosing(running) as events:
                async for event in events:
                    if isinstance(event, Progress):
                        progress = admin_pb2.ProfileProgress(done=event.done, total=event.total, stage=event.stage)
                        yield admin_pb2.ProfileResponse(progress=progress)
                    else:
                        yield admin_pb2.ProfileResponse(result=profile_to_wire(event))


def describe(group: Group) -> group_pb2.DescribeResponse:
    """What an operator reads of the group that this process owns."""
    scheduler = group.scheduler
    snapshot = scheduler.snapshot() if scheduler is not None else None
    return group_pb2.DescribeResponse(
        group=group_status(group),
        drafts=draft_statuses(group),
        queued=snapshot.num_waiting if snapshot is not None else 0,
        running=snapshot.num_running if snapshot is not None else 0,
    )


def group_status(group: Group) -> admin_pb2.GroupStatus:
    """The group as it is; where no target was attached yet, its state only."""
    status = admin_pb2.GroupStatus(state=group.target.state)
    record, info, scheduler = group.target.record, group.info, group.scheduler
    if info is None or scheduler is None:
        return status
    snapshot = scheduler.snapshot()
    checksums = {report.rank: report.committed_checksum for report in group.ranks}
    status.MergeFrom(
        admin_pb2.GroupStatus(
            group_id=info.group_id,
            epoch=snapshot.epoch,
            leader_address=record.get("address", ""),
            model=info.model,
            dtype=info.dtype,
            tensor_parallel_size=info.tensor_parallel_size,
            kv_blocks_total=snapshot.num_blocks,
            kv_blocks_free=snapshot.num_free_blocks,
            steps=snapshot.num_steps,
            row_invariant=info.row_invariant,
            step_overhead=overhead_to_wire(group.overhead.snapshot()),
            prefix_cache_queried_tokens=snapshot.prefix_cache_queries,
            prefix_cache_hit_tokens=snapshot.prefix_cache_hits,
            lookup_draft_tokens=snapshot.num_lookup_tokens,
            lookup_accepted_tokens=snapshot.num_lookup_accepted,
            preemptions=snapshot.num_preemptions,
            speculation=speculation_to_wire(snapshot.speculation),
            ranks=[
                admin_pb2.RankStatus(
                    rank=rank["rank"],
                    node=str(rank.get("node", "")),
                    pid=rank.get("pid", 0),
                    committed_checksum=checksums.get(rank["rank"], 0),
                )
                for rank in record.get("ranks", ())
            ],
        )
    )
    return status


def speculation_to_wire(speculation: SpeculationSnapshot) -> admin_pb2.SpeculationStatus:
    return admin_pb2.SpeculationStatus(
        level=speculation.level,
        paused_for_load=speculation.is_paused,
        num_streams=speculation.num_streams,
        plain_goodput=speculation.goodput.get("plain", 0.0),
        half_goodput=speculation.goodput.get("half", 0.0),
        full_goodput=speculation.goodput.get("full", 0.0),
    )


def overhead_to_wire(overhead: Overhead) -> admin_pb2.StepOverhead:
    def quantiles(values: Quantiles) -> admin_pb2.Quantiles:
        return admin_pb2.Quantiles(p50=values.p50, p99=values.p99)

    return admin_pb2.StepOverhead(
        num_steps=overhead.num_steps,
        overhead_ms=quantiles(overhead.overhead_ms),
        plan_ms=quantiles(overhead.plan_ms),
        verify_ms=quantiles(overhead.verify_ms),
    )


def draft_statuses(group: Group) -> list[admin_pb2.DraftStatus]:
    """All drafts of the registry, those that were refused included."""
    scheduler, pool = group.scheduler, group.drafts
    if scheduler is None or pool is None:
        return []
    counts = {draft.draft_id: draft for draft in scheduler.snapshot().drafts}
    statuses = []
    for draft_id, draft in sorted(pool.drafts.items()):
        record = draft.record
        status = admin_pb2.DraftStatus(
            draft_id=draft_id,
            address=record.get("address", ""),
            state=draft.state,
            model=record.get("model", ""),
            drafter=draft.drafter,
            pid=record.get("pid", 0),
            node=str(record.get("node", "")),
            placement=record.get("placement", ""),
        )
        if draft_id in counts:
            count = counts[draft_id]
            status.sessions = count.num_sessions
            status.proposal_ms = count.proposal_ms
            status.num_draft_tokens = count.num_draft_tokens
            status.num_accepted_tokens = count.num_accepted_tokens
        statuses.append(status)
    return statuses

"""What of a cluster a supervisor has started, and what is written down of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from outrider.cluster.config import ClusterConfig
from outrider.cluster.draft_pool import DraftPool
from outrider.cluster.metrics import Parts
from outrider.cluster.placement import DraftSeat, threads_per_actor
from outrider.cluster.ray_cluster import RayCluster
from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Registry
from outrider.cluster.report import Reporter
from outrider.cluster.router_process import RouterProcess
from outrider.cluster.state import ClusterState, StateFolder, child_of
from outrider.cluster.target_group import TargetGroup
from outrider.cluster.telemetry import log_settings
from outrider.http_port import HttpPort

Part = TypeVar("Part")


@dataclass
class ClusterParts:
    """The parts of one cluster. Those that were not started, or are other people's, are None.

    Attributes:
        folder: where ``state`` is written by ``remember``.
        ray_started: whether Ray was asked to start, so that it has to be stopped.
        keeping_drafts: starts drafts again, where it began before the cluster was ready.
        telling: serves ``listener``, the port of the metrics.
    """

    config: ClusterConfig
    folder: StateFolder
    reporter: Reporter
    state: ClusterState
    ray: RayCluster
    ray_started: bool = False
    redis: RedisServer | None = None
    registry: Registry | None = None
    group: TargetGroup | None = None
    seats: tuple[DraftSeat, ...] = ()
    drafts: DraftPool | None = None
    keeping_drafts: asyncio.Task[None] | None = None
    router: RouterProcess | None = None
    listener: HttpPort | None = None
    telling: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: ClusterConfig, settings_file: Path, folder: StateFolder, reporter: Reporter) -> ClusterParts:
        """Nothing is started yet."""
        return cls(
            config,
            folder,
            reporter,
            ClusterState(config.cluster, os.getpid(), "starting", settings_file=str(settings_file)),
            RayCluster(config.ray, config.cluster, json_logs=log_settings(config).format == "json"),
        )

    def remember(self, **changes: Any) -> None:
        """Write the state down, with the processes that would outlive a killed supervisor."""
        children = []
        with contextlib.suppress(ProcessLookupError):
            if self.redis is not None and self.redis.running():
                children.append(child_of("redis-server", self.redis.pid))
            if self.router is not None and self.router.running():
                children.append(child_of("router", self.router.pid))
        self.state = dataclasses.replace(self.state, children=tuple(children), **changes)
        self.folder.write(self.state)

    async def build_group(self) -> None:
        """Start the ranks of the target, in the place of those that are left. Raises ``OutriderError``."""
        group = need(self.group)
        group.discard()
        await group.build(need(self.registry), self.threads_on)
        ranks = ", ".join(f"rank {rank} is process {facts['pid']}" for rank, facts in enumerate(group.rank_facts))
        self.reporter.progress(f"the target is ready in epoch {group.epoch}: {ranks}")

    def threads_on(self, node_id: str | None) -> int:
        """How many threads each actor on a node has."""
        return threads_per_actor(node_id, self.ray.nodes(), need(self.group).rank_nodes, self.seats)

    def facts(self) -> Parts:
        """For the metrics."""
        group, drafts, router = self.group, self.drafts, self.router
        return Parts(
            ready=self.state.phase == "ready",
            epoch=group.epoch if group is not None else 0,
            rebuilds=max(0, group.num_builds - 1) if group is not None else 0,
            router_restarts=max(0, router.num_launches - 1) if router is not None else 0,
            draft_restarts=drafts.restarts if drafts is not None else {},
            ranks=group.workers if group is not None else {},
            drafts=drafts.workers if drafts is not None else {},
        )


def need(part: Part | None) -> Part:
    """A part that is there by now."""
    if part is None:
        raise RuntimeError("used before the start got that far")
    return part

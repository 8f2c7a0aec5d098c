"""The supervisor's side of a target group: place its ranks, form the group, see that it lives, form it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from outrider.cluster.config import TargetConfig
from outrider.cluster.placement import ClusterPlacement, local_size, rank_device
from outrider.cluster.ray_cluster import Actor, RayCluster, TargetRank, thread_environment
from outrider.cluster.redis_access import RedisAccess
from outrider.cluster.registry import Registry
from outrider.cluster.telemetry import ActorEnvironment, no_environment
from outrider.cluster.waiting import all_or_first_error
from outrider.core.errors import GroupError
from outrider.core.logs import Process

SHARD = "outrider.workers.target.shard:TargetShard"
PLACE_TIMEOUT_S = 60.0
PROCESS_TIMEOUT_S = 120.0  # for a fresh process to import its libraries
START_TIMEOUT_S = 900.0  # for all ranks to load the model
STOP_TIMEOUT_S = 10.0
POLL_S = 0.5


class TargetGroup:
    """One group of ranks. ``build`` may be called again after ``discard``; the epoch grows each time.

    Attributes:
        num_builds: times that it was formed.
    """

    def __init__(
        self,
        ray_cluster: RayCluster,
        placement: ClusterPlacement,
        config: TargetConfig,
        *,
        cluster: str,
        group_id: str,
        redis_url: RedisAccess,
        environment: ActorEnvironment = no_environment,
    ) -> None:
        """``environment``: further variables of a rank's process."""
        self._ray = ray_cluster
        self._placement = placement
        self._config = config
        self._cluster = cluster
        self.group_id = group_id
        self._redis_url = redis_url
        self._environment = environment
        self._bundles: Any = None
        self._ranks: list[Actor] = []
        self._serves = False
        self.num_builds = 0
        self.epoch = 0
        self.rank_nodes: list[str] = []
        self.rank_facts: list[dict[str, Any]] = []

    async def place(self) -> None:
        """Reserve the resources. Raises ``ConfigError`` if Ray has no room."""
        from ray.util.placement_group import placement_group_table

        self._bundles = await self._ray.place(self._placement.bundles, self._placement.strategy, PLACE_TIMEOUT_S)
        where = placement_group_table(self._bundles)["bundles_to_node_id"]
        self.rank_nodes = [where[rank] for rank in range(self._config.tensor_parallel_size)]

    @property
    def workers(self) -> dict[str, Actor | None]:
        """Each rank by its number; None while the group does not serve."""
        numbers = range(self._config.tensor_parallel_size)
        return {str(rank): self._ranks[rank] if self._serves else None for rank in numbers}

    def draft_options(self) -> dict[str, Any]:
        """Ray options for a draft that has its share in the bundle of rank 0."""
        return self._bundle(0)

    async def build(self, registry: Registry, threads_on: Callable[[str | None], int]) -> None:
        """Start the ranks and form the group. Raises ``OutriderError`` and leaves no rank if that fails.

        ``threads_on`` gives the threads of an actor on a node.
        """
        # A Redis that lost its memory counts from one again; ours must grow all the same.
        while (epoch := await registry.next_epoch(self.group_id)) <= self.epoch:
            pass
        self.epoch = epoch
        try:
            await self._start_ranks(threads_on)
        except BaseException:
            self.discard()
            raise
        self._serves = True
        self.num_builds += 1

    async def _start_ranks(self, threads_on: Callable[[str | None], int]) -> None:
        device = rank_device(self._config, self._placement.rank_needs)
        for rank, node in enumerate(self.rank_nodes):
            num_threads = self._config.num_threads or threads_on(node)
            arguments = {
                "config": self._config.model_copy(update={"num_threads": num_threads, "device": device}),
                "cluster": self._cluster,
                "group_id": self.group_id,
                "rank": rank,
                "epoch": self.epoch,
                "redis_url": self._redis_url,
            }
            process = Process("target", str(rank), self._cluster, self.epoch)
            self._ranks.append(
                Actor(
                    f"target rank {rank}",
                    TargetRank,
                    SHARD,
                    arguments,
                    needs=self._placement.rank_needs,
                    runtime_env={"env_vars": thread_environment(num_threads) | self._environment(process)},
                    **self._bundle(rank),
                )
            )
        self.rank_facts = await self._each("node", timeout_s=PROCESS_TIMEOUT_S)
        self.rank_nodes = [facts["node_id"] for facts in self.rank_facts]
        address, port = await self._ranks[0].call("reserve", timeout_s=PROCESS_TIMEOUT_S)
        size = local_size(self.rank_nodes)
        await self._each("start", address, port, size, timeout_s=START_TIMEOUT_S)

    async def _each(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return await all_or_first_error(*(rank.call(method, *args, timeout_s=timeout_s) for rank in self._ranks))

    async def watch(self) -> None:
        """Runs while every rank is well. Raises ``GroupError`` as soon as one is not."""
        while True:
            reports = await self._each("health", timeout_s=self._config.step_timeout_s)
            for rank, report in zip(self._ranks, reports, strict=True):
                if report["state"] != "ready":
                    raise GroupError(f"{rank.title} is {report['state']}: {report.get('message', 'no reason given')}")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Ask each rank to leave, then end it."""
        with contextlib.suppress(GroupError):
            await self._each("stop", timeout_s=STOP_TIMEOUT_S)
        self.discard()

    def discard(self) -> None:
        """End every rank's process at once."""
        for rank in self._ranks:
            rank.kill()
        self._ranks, self.rank_facts, self._serves = [], [], False

    def release(self) -> None:
        """Give the resources back to Ray."""
        from ray.util.placement_group import remove_placement_group

        if self._bundles is not None:
            remove_placement_group(self._bundles)
            self._bundles = None

    def _bundle(self, index: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._bundles, index)}

"""The supervisor's side of draft workers: start them, see that they live, start others in their place."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from outrider.cluster.keeper import keep
from outrider.cluster.placement import DraftSeat, draft_node, shortage
from outrider.cluster.ray_cluster import Actor, Draft, RayCluster, thread_environment
from outrider.cluster.redis_access import RedisAccess
from outrider.cluster.target_group import TargetGroup
from outrider.cluster.telemetry import ActorEnvironment, no_environment
from outrider.cluster.waiting import all_or_first_error
from outrider.core.errors import GroupError, Unavailable
from outrider.core.logs import Process

WORKER = "outrider.workers.draft.worker:DraftWorker"
START_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.5


class DraftProcess:
    """One seat and whoever sits in it. Each worker has an id of its own: ``draft-0``, after a death ``draft-0.1``.

    Attributes:
        num_starts: workers that came to serve, one after the other.
    """

    def __init__(
        self,
        ray_cluster: RayCluster,
        seat: DraftSeat,
        group: TargetGroup,
        *,
        cluster: str,
        redis_url: RedisAccess,
        environment: ActorEnvironment = no_environment,
    ) -> None:
        """``environment``: further variables of a worker's process."""
        self._ray = ray_cluster
        self._seat = seat
        self._group = group
        self._cluster = cluster
        self._redis_url = redis_url
        self._environment = environment
        self._incarnations = itertools.count()
        self._actor: Actor | None = None
        self._serves = False
        self.num_starts = 0
        self.draft_id = seat.name

    async def start(self, threads_on: Callable[[str | None], int]) -> None:
        """Start a worker and wait until it serves. Raises ``OutriderError`` and leaves no process if that fails, and
        ``Unavailable`` at once if no node of Ray could ever hold it.

        ``threads_on`` gives the threads of an actor on a node, or on one that Ray chooses.
        """
        self._require_a_node()
        incarnation = next(self._incarnations)
        self.draft_id = self._seat.name if incarnation == 0 else f"{self._seat.name}.{incarnation}"
        node, options = self._where()
        num_threads = self._seat.pool.num_threads or threads_on(node)
        arguments = {
            "config": self._seat.pool.model_copy(update={"num_threads": num_threads}),
            "cluster": self._cluster,
            "draft_id": self.draft_id,
            "redis_url": self._redis_url,
        }
        process = Process("draft", self.draft_id, self._cluster)
        self._actor = Actor(
            f"draft {self.draft_id}",
            Draft,
            WORKER,
            arguments,
            needs=self._seat.needs,
            runtime_env={"env_vars": thread_environment(num_threads) | self._environment(process)},
            **options,
        )
        try:
            await self._actor.call("start", timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.discard()
            raise
        self._serves = True
        self.num_starts += 1

    async def watch(self) -> None:
        """Runs while the worker is well. Raises ``GroupError`` as soon as it is not."""
        while self._actor is not None:
            report = await self._actor.call("health", timeout_s=HEALTH_TIMEOUT_S)
            if report["state"] != "ready":
                raise GroupError(
                    f"draft {self.draft_id} is {report['state']}: {report.get('error', 'no reason given')}"
                )
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Ask the worker to leave, then end it."""
        if self._actor is not None:
            with contextlib.suppress(GroupError):
                await self._actor.call("stop", timeout_s=STOP_TIMEOUT_S)
        self.discard()

    def discard(self) -> None:
        """End the process at once."""
        self._serves = False
        if self._actor is not None:
            self._actor.kill()
            self._actor = None

    @property
    def seat_name(self) -> str:
        return self._seat.name

    @property
    def worker(self) -> Actor | None:
        """Whoever sits here; None while nobody serves."""
        return self._actor if self._serves else None

    def _require_a_node(self) -> None:
        """Ray itself would let the worker wait in silence. One with rank 0 has its share reserved."""
        lacking = None
        if self._seat.pool.placement != "sameNode":
            lacking = shortage([self._seat.needs], self._ray.nodes())
        if lacking is not None:
            raise Unavailable(f"the draft {self._seat.name} has no node: {lacking}")

    def _where(self) -> tuple[str | None, dict[str, Any]]:
        """The node, or None where Ray chooses, and the Ray options that say so."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pool, rank_nodes = self._seat.pool, self._group.rank_nodes
        node = draft_node(pool.placement, self._seat.needs, self._ray.nodes(), rank_nodes)
        if pool.placement == "sameNode":
            return node, self._group.draft_options()
        return node, {} if node is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


class DraftPool:
    """All draft workers of a cluster. The target never waits for them, unless one asks ``start`` to."""

    def __init__(
        self,
        drafts: Sequence[DraftProcess],
        threads_on: Callable[[str | None], int],
        report: Callable[[str], None],
    ) -> None:
        """``report`` gets one line for each draft that comes or goes."""
        self._drafts = tuple(drafts)
        self._threads_on = threads_on
        self._report = report

    def __len__(self) -> int:
        return len(self._drafts)

    @property
    def names(self) -> list[str]:
        return [draft.draft_id for draft in self._drafts]

    @property
    def workers(self) -> dict[str, Actor | None]:
        """By seat; None while nobody serves there."""
        return {draft.seat_name: draft.worker for draft in self._drafts}

    @property
    def restarts(self) -> dict[str, int]:
        """How often a worker came to serve in the place of another, by seat."""
        return {draft.seat_name: max(0, draft.num_starts - 1) for draft in self._drafts}

    async def start(self) -> None:
        """Start all of them. Raises the first ``OutriderError``."""
        await all_or_first_error(*(self._start(draft) for draft in self._drafts))

    async def keep(self) -> None:
        """Start those that are not there, now and whenever one dies, for as long as it takes. Cancel it."""
        keepers = (
            keep(f"the draft {draft.draft_id}", draft.watch, partial(self._start, draft), self._report)
            for draft in self._drafts
        )
        await all_or_first_error(*keepers)

    async def stop(self) -> None:
        await asyncio.gather(*(draft.stop() for draft in self._drafts))

    async def _start(self, draft: DraftProcess) -> None:
        draft.discard()
        await draft.start(self._threads_on)
        self._report(f"the draft {draft.draft_id} is ready")

"""How the parts of a cluster are started, in the order in which they stand on each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from outrider.cluster.draft_pool import DraftPool, DraftProcess
from outrider.cluster.metrics import SupervisorMetrics
from outrider.cluster.parts import ClusterParts, need
from outrider.cluster.placement import ClusterPlacement, plan_placement, shortage
from outrider.cluster.ray_cluster import host_and_port
from outrider.cluster.redis_access import RedisAccess
from outrider.cluster.redis_server import LOOPBACK, RedisServer, address_towards
from outrider.cluster.registry import Registry
from outrider.cluster.router_process import RouterProcess
from outrider.cluster.target_group import TargetGroup
from outrider.cluster.telemetry import actor_environment
from outrider.cluster.waiting import all_or_first_error, guarded
from outrider.core.errors import Unavailable
from outrider.metrics.listener import metrics_listener

ROOM_POLL_S = 1.0


class Startup:
    """Starts the parts of one cluster. What was started when it fails is the caller's to stop."""

    def __init__(
        self,
        parts: ClusterParts,
        take_signals: Callable[[], None],
        *,
        with_router: bool = True,
        room_timeout_s: float = 0.0,
    ) -> None:
        """
        Args:
            take_signals: makes signals stop the supervisor; called again after Ray took them for itself.
            with_router: else routers are run by others, and so is Redis.
            room_timeout_s: how long to wait for Ray, and for nodes of it that the target fits on.
        """
        self._parts = parts
        self._config = parts.config
        self._reporter = parts.reporter
        self._take_signals = take_signals
        self._with_router = with_router
        self._room_timeout_s = room_timeout_s

    async def start(self) -> None:
        """Returns once the cluster is ready. Raises ``OutriderError``."""
        parts = self._parts
        parts.remember()
        self._tell_metrics()
        redis_url = await self._start_redis()
        parts.registry = registry = Registry(redis_url, self._config.cluster)
        await registry.check()
        await self.start_ray()
        placement = await self.room()
        parts.group = group = TargetGroup(
            parts.ray,
            placement,
            self._config.target,
            cluster=self._config.cluster,
            group_id="target",
            redis_url=redis_url,
            environment=partial(actor_environment, self._config),
        )
        await group.place()
        parts.seats = placement.drafts
        parts.drafts = drafts = DraftPool(
            [
                DraftProcess(
                    parts.ray,
                    seat,
                    group,
                    cluster=self._config.cluster,
                    redis_url=redis_url,
                    environment=partial(actor_environment, self._config),
                )
                for seat in placement.drafts
            ],
            parts.threads_on,
            self._reporter.progress,
        )
        if self._with_router:
            url = self._config.redis.url or need(parts.redis).url  # as it was given, with a password that is in it
            parts.router = RouterProcess(self._config, parts.folder.path, url)
            parts.router.launch()
            parts.remember()
        ranks = self._config.target.tensor_parallel_size
        self._reporter.progress(f"loading the target {self._config.target.model} on {ranks} rank(s)")
        for name in drafts.names:
            self._reporter.progress(f"starting the draft {name}")
        if parts.router is None:
            # Their machines may come later than the target's, or never: it serves without them.
            parts.keeping_drafts = asyncio.create_task(drafts.keep())
            await parts.build_group()
            parts.remember(phase="ready")
            self._reporter.progress("ready: the target serves")
            return
        router = parts.router
        await guarded(all_or_first_error(parts.build_group(), drafts.start()), router.watch())
        await router.wait_registered(registry)
        await router.wait_ready(registry, len(drafts))
        if router.http_url:
            self._reporter.progress(f"OpenAI clients find the model at {router.http_url}")
        if router.metrics_url:
            self._reporter.progress(f"the router tells its metrics at {router.metrics_url}")
        parts.remember(phase="ready", router_address=router.address, router_metrics_url=router.metrics_url)
        self._reporter.ready(router.address)

    async def start_ray(self) -> None:
        """Start a local Ray, or join the one of the settings once it answers. Raises ``Unavailable``."""
        ray = self._parts.ray
        ray.prepare()
        if ray.scratch is not None:
            self._parts.remember(scratch=(str(ray.scratch),))
            self._reporter.progress("starting a local Ray")
        else:
            self._reporter.progress(f"joining Ray at {self._config.ray.address}")
        self._parts.ray_started = True
        deadline = time.monotonic() + self._room_timeout_s
        told = ""
        while True:
            try:
                # In this thread: Ray ties its processes to the thread that started them.
                ray.start(plan_placement(self._config).num_actors)
                break
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                if str(error) != told:
                    told = str(error)
                    self._reporter.progress(f"waiting for Ray: {told}")
            finally:
                self._take_signals()  # Ray takes SIGTERM for itself
            await asyncio.sleep(ROOM_POLL_S)
        self._parts.remember(ray_address=ray.address)

    async def room(self) -> ClusterPlacement:
        """The placement on the nodes that are there, once they have room for the target or time is up."""
        deadline = time.monotonic() + self._room_timeout_s
        told = None
        while True:
            nodes = self._parts.ray.nodes()
            placement = plan_placement(self._config, num_gpus=sum(node.total.get("GPU", 0.0) for node in nodes))
            lacking = shortage(placement.bundles, nodes)
            if lacking is None or time.monotonic() > deadline:
                return placement
            if lacking != told:
                told = lacking
                self._reporter.progress(f"waiting for nodes of Ray: {lacking}")
            await asyncio.sleep(ROOM_POLL_S)

    def _tell_metrics(self) -> None:
        """Begin to answer Prometheus and the kubelet, long before there is much to tell."""
        parts, port = self._parts, self._config.supervisor.metrics_port
        if port is None:
            return
        parts.listener = metrics_listener(
            "supervisor.metrics_port",
            self._config.router.host,
            port,
            tell=SupervisorMetrics(parts.facts).tell,
            state=lambda: parts.state.phase,
        )
        parts.listener.listen()
        parts.telling = asyncio.create_task(parts.listener.serve(), name="metrics")
        parts.remember(metrics_url=parts.listener.url)
        self._reporter.progress(f"the supervisor tells its metrics at {parts.listener.url}")

    async def _start_redis(self) -> RedisAccess:
        config = self._config.redis
        if config.url is not None:
            access = RedisAccess.of(config.url, config)
            self._reporter.progress(f"using Redis at {access}")
        else:
            self._parts.redis = redis = RedisServer(self._parts.folder.path / "redis", host=self._redis_host())
            await asyncio.to_thread(redis.start)
            access = RedisAccess.of(redis.url)
            self._reporter.progress(f"started Redis at {access}")
        self._parts.remember(redis_url=str(access))
        return access

    def _redis_host(self) -> str:
        """Where the nodes of a Ray cluster that was joined reach this machine; they may be other ones."""
        address = self._config.ray.address
        where = host_and_port(address) if address is not None else None
        if where is None:
            return LOOPBACK
        try:
            return address_towards(*where)
        except OSError as error:
            raise Unavailable(f"Ray at {address} cannot be reached ({error.strerror}); correct ray.address") from error

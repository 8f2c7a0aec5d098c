"""The process behind ``outrider up``: starts Redis, Ray, ranks, drafts and router, watches them, stops them.
Behind ``outrider supervise`` it is ranks and drafts alone: Redis, Ray and routers are other people's.

``python -m outrider.cluster.supervisor -f FILE [--report-fd N]`` is the detached form; with ``--report-fd`` progress
goes to that pipe as records (see ``report``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from outrider.cluster.checks import check_models, check_router_port, require_others
from outrider.cluster.config import ClusterConfig, load_config
from outrider.cluster.draft_pool import DraftPool, DraftProcess
from outrider.cluster.keeper import keep
from outrider.cluster.metrics import Parts, SupervisorMetrics
from outrider.cluster.placement import ClusterPlacement, DraftSeat, plan_placement, shortage, threads_per_actor
from outrider.cluster.ray_cluster import RayCluster, host_and_port
from outrider.cluster.redis_access import RedisAccess
from outrider.cluster.redis_server import LOOPBACK, RedisServer, address_towards
from outrider.cluster.registry import Registry
from outrider.cluster.report import LogReporter, Reporter, output_to
from outrider.cluster.router_process import RouterProcess
from outrider.cluster.state import ClusterState, StateFolder, child_of
from outrider.cluster.target_group import TargetGroup
from outrider.cluster.telemetry import actor_environment, log_settings, trace_settings
from outrider.cluster.waiting import all_or_first_error, guarded
from outrider.core.errors import OutriderError, Unavailable
from outrider.core.logs import Process, configure
from outrider.http_port import HttpPort
from outrider.metrics.listener import metrics_listener

log = logging.getLogger("outrider.cluster.supervisor")  # also where this module is the program

Part = TypeVar("Part")

POLL_S = 0.25
ROOM_POLL_S = 1.0


class Supervisor:
    """One cluster from ``run`` to the end of ``run``."""

    def __init__(
        self,
        config: ClusterConfig,
        settings_file: Path,
        folder: StateFolder,
        reporter: Reporter,
        *,
        with_router: bool = True,
        room_timeout_s: float = 0.0,
    ) -> None:
        """``room_timeout_s``: how long to wait for Ray, and for nodes of it that the target fits on."""
        self._config = config
        self._with_router = with_router
        self._room_timeout_s = room_timeout_s
        self._folder = folder
        self._reporter = reporter
        self._state = ClusterState(config.cluster, os.getpid(), "starting", settings_file=str(settings_file))
        self._stopping = asyncio.Event()
        self._redis: RedisServer | None = None
        self._ray = RayCluster(config.ray, config.cluster, json_logs=log_settings(config).format == "json")
        self._ray_started = False
        self._registry: Registry | None = None
        self._group: TargetGroup | None = None
        self._seats: tuple[DraftSeat, ...] = ()
        self._drafts: DraftPool | None = None
        self._keeping_drafts: asyncio.Task[None] | None = None
        self._router: RouterProcess | None = None
        self._listener: HttpPort | None = None
        self._telling: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start everything, serve until SIGTERM or SIGINT, stop everything.

        Raises ``OutriderError`` if the start fails; what was started by then is stopped.
        """
        self._listen()
        try:
            await self._until_stopped(self._start())
            if self._state.phase != "ready":
                raise Unavailable("stopped before the cluster was ready")
            await self._until_stopped(self._watch())
        finally:
            await self._stop()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stopping.set)

    async def _until_stopped(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    # ---- start ----

    async def _start(self) -> None:
        self._remember()
        self._tell_metrics()
        redis_url = await self._start_redis()
        self._registry = registry = Registry(redis_url, self._config.cluster)
        await registry.check()
        await self._start_ray()
        placement = await self._room()
        self._group = group = TargetGroup(
            self._ray,
            placement,
            self._config.target,
            cluster=self._config.cluster,
            group_id="target",
            redis_url=redis_url,
            environment=partial(actor_environment, self._config),
        )
        await group.place()
        self._seats = placement.drafts
        self._drafts = drafts = DraftPool(
            [
                DraftProcess(
                    self._ray,
                    seat,
                    group,
                    cluster=self._config.cluster,
                    redis_url=redis_url,
                    environment=partial(actor_environment, self._config),
                )
                for seat in placement.drafts
            ],
            self._threads_on,
            self._reporter.progress,
        )
        if self._with_router:
            url = self._config.redis.url or _need(self._redis).url  # as it was given, with a password that is in it
            self._router = RouterProcess(self._config, self._folder.path, url)
            self._router.launch()
            self._remember()
        ranks = self._config.target.tensor_parallel_size
        self._reporter.progress(f"loading the target {self._config.target.model} on {ranks} rank(s)")
        for name in drafts.names:
            self._reporter.progress(f"starting the draft {name}")
        if self._router is None:
            # Their machines may come later than the target's, or never: it serves without them.
            self._keeping_drafts = asyncio.create_task(drafts.keep())
            await self._build_group()
            self._remember(phase="ready")
            self._reporter.progress("ready: the target serves")
            return
        router = self._router
        await guarded(all_or_first_error(self._build_group(), drafts.start()), router.watch())
        await router.wait_registered(registry)
        await router.wait_ready(registry, len(drafts))
        if router.http_url:
            self._reporter.progress(f"OpenAI clients find the model at {router.http_url}")
        if router.metrics_url:
            self._reporter.progress(f"the router tells its metrics at {router.metrics_url}")
        self._remember(phase="ready", router_address=router.address, router_metrics_url=router.metrics_url)
        self._reporter.ready(router.address)

    def _tell_metrics(self) -> None:
        """Begin to answer Prometheus and the kubelet, long before there is much to tell."""
        port = self._config.supervisor.metrics_port
        if port is None:
            return
        self._listener = metrics_listener(
            "supervisor.metrics_port",
            self._config.router.host,
            port,
            tell=SupervisorMetrics(self._parts).tell,
            state=lambda: self._state.phase,
        )
        self._listener.listen()
        self._telling = asyncio.create_task(self._listener.serve(), name="metrics")
        self._remember(metrics_url=self._listener.url)
        self._reporter.progress(f"the supervisor tells its metrics at {self._listener.url}")

    def _parts(self) -> Parts:
        group, drafts, router = self._group, self._drafts, self._router
        return Parts(
            ready=self._state.phase == "ready",
            epoch=group.epoch if group is not None else 0,
            rebuilds=max(0, group.num_builds - 1) if group is not None else 0,
            router_restarts=max(0, router.num_launches - 1) if router is not None else 0,
            draft_restarts=drafts.restarts if drafts is not None else {},
            ranks=group.workers if group is not None else {},
            drafts=drafts.workers if drafts is not None else {},
        )

    async def _start_redis(self) -> RedisAccess:
        config = self._config.redis
        if config.url is not None:
            access = RedisAccess.of(config.url, config)
            self._reporter.progress(f"using Redis at {access}")
        else:
            self._redis = RedisServer(self._folder.path / "redis", host=self._redis_host())
            await asyncio.to_thread(self._redis.start)
            access = RedisAccess.of(self._redis.url)
            self._reporter.progress(f"started Redis at {access}")
        self._remember(redis_url=str(access))
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

    async def _start_ray(self) -> None:
        self._ray.prepare()
        if self._ray.scratch is not None:
            self._remember(scratch=(str(self._ray.scratch),))
            self._reporter.progress("starting a local Ray")
        else:
            self._reporter.progress(f"joining Ray at {self._config.ray.address}")
        self._ray_started = True
        deadline = time.monotonic() + self._room_timeout_s
        told = ""
        while True:
            try:
                # In this thread: Ray ties its processes to the thread that started them.
                self._ray.start(plan_placement(self._config).num_actors)
                break
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                if str(error) != told:
                    told = str(error)
                    self._reporter.progress(f"waiting for Ray: {told}")
            finally:
                self._listen()  # Ray takes SIGTERM for itself
            await asyncio.sleep(ROOM_POLL_S)
        self._remember(ray_address=self._ray.address)

    async def _room(self) -> ClusterPlacement:
        """The placement on the nodes that are there, once they have room for the target or time is up."""
        deadline = time.monotonic() + self._room_timeout_s
        told = None
        while True:
            nodes = self._ray.nodes()
            placement = plan_placement(self._config, num_gpus=sum(node.total.get("GPU", 0.0) for node in nodes))
            lacking = shortage(placement.bundles, nodes)
            if lacking is None or time.monotonic() > deadline:
                return placement
            if lacking != told:
                told = lacking
                self._reporter.progress(f"waiting for nodes of Ray: {lacking}")
            await asyncio.sleep(ROOM_POLL_S)

    async def _build_group(self) -> None:
        group = _need(self._group)
        group.discard()
        await group.build(_need(self._registry), self._threads_on)
        ranks = ", ".join(f"rank {rank} is process {facts['pid']}" for rank, facts in enumerate(group.rank_facts))
        self._reporter.progress(f"the target is ready in epoch {group.epoch}: {ranks}")

    async def _start_router(self) -> None:
        router = _need(self._router)
        await router.stop()  # of two with the same ports and name neither would serve
        router.launch()
        self._remember()
        await router.wait_registered(_need(self._registry), timeout_s=None)
        self._remember(router_address=router.address, router_metrics_url=router.metrics_url)
        self._reporter.progress(f"the router listens on {router.address} again")

    def _threads_on(self, node_id: str | None) -> int:
        return threads_per_actor(node_id, self._ray.nodes(), _need(self._group).rank_nodes, self._seats)

    def _remember(self, **changes: Any) -> None:
        """Write the state down, with the processes that would outlive a killed supervisor."""
        children = []
        with contextlib.suppress(ProcessLookupError):
            if self._redis is not None and self._redis.running():
                children.append(child_of("redis-server", self._redis.pid))
            if self._router is not None and self._router.running():
                children.append(child_of("router", self._router.pid))
        self._state = dataclasses.replace(self._state, children=tuple(children), **changes)
        self._folder.write(self._state)

    # ---- watch ----

    async def _watch(self) -> None:
        group = _need(self._group)
        report = self._reporter.progress
        keepers = [
            keep("the target group", group.watch, self._build_group, report),
            self._keeping_drafts or _need(self._drafts).keep(),
        ]
        if self._router is not None:
            keepers.append(keep("the router", self._router.watch, self._start_router, report))
        if self._redis is not None:
            keepers.append(keep("redis-server", self._watch_redis, self._restart_redis, report))
        await all_or_first_error(*keepers)

    async def _watch_redis(self) -> None:
        while True:
            if not _need(self._redis).running():
                raise Unavailable("redis-server ended")
            await asyncio.sleep(POLL_S)

    async def _restart_redis(self) -> None:
        server = _need(self._redis)
        await asyncio.to_thread(server.start, port=server.port)
        self._remember()

    # ---- stop ----

    async def _stop(self) -> None:
        """Clients first, then what they stand on. Each part is stopped whatever became of the others."""
        if self._state.phase == "ready":
            self._reporter.progress("stopping")
        if self._router is not None:
            await self._router.stop()
        if self._keeping_drafts is not None:
            self._keeping_drafts.cancel()
            await asyncio.gather(self._keeping_drafts, return_exceptions=True)
        if self._drafts is not None:
            await self._drafts.stop()
        if self._group is not None:
            await self._group.stop()
            self._group.release()
        if self._ray_started:
            self._ray.stop()
        if self._registry is not None:
            await self._registry.aclose()
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop)
        if self._listener is not None and self._telling is not None:
            await self._listener.stop()
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)


def _need(part: Part | None) -> Part:
    if part is None:
        raise RuntimeError("used before the start got that far")
    return part


def supervise(
    settings_file: Path, *, report_fd: int | None = None, apart: bool = False, room_timeout_s: float = 0.0
) -> int:
    """Run a cluster in this process until it is told to stop. Answers the exit code; errors were reported by then.

    Progress goes to the standard error of before, or as records to ``report_fd``. ``apart``: Redis, Ray and routers
    are run by others, and the log goes to standard error, where whoever runs a container looks for it.
    """
    settings_file = settings_file.resolve()
    reporter = Reporter(os.dup(2) if report_fd is None else report_fd, as_records=report_fd is not None)
    try:
        config = load_config(settings_file)
        if apart:
            require_others(config)
        folder = StateFolder(config.cluster)
        log_to_file = partial(output_to, folder.log_file, for_good=report_fd is not None)
        with folder.hold(), contextlib.nullcontext() if apart else log_to_file():
            logs = log_settings(config)
            configure(logs, Process("supervisor", socket.gethostname(), config.cluster))
            trace_settings(config)  # what is missing for them is told now, and not by each process
            if apart and logs.format == "json":
                reporter.close()
                reporter = LogReporter(log)
            check_models(config)
            if not apart:
                check_router_port(config)
            # Ray puts the working directory on the workers' import path: let there be nothing to import.
            os.chdir(folder.path)
            # Programs of this virtual environment, such as ninja, also where it was not activated.
            os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
            try:
                supervisor = Supervisor(
                    config, settings_file, folder, reporter, with_router=not apart, room_timeout_s=room_timeout_s
                )
                asyncio.run(supervisor.run())
            except OutriderError as error:
                if not isinstance(reporter, LogReporter):
                    log.error("%s", error)
                raise
    except OutriderError as error:
        reporter.error(str(error))
        return 1
    finally:
        reporter.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider.cluster.supervisor")
    parser.add_argument("-f", "--file", type=Path, required=True)
    parser.add_argument("--report-fd", type=int)
    arguments = parser.parse_args()
    return supervise(arguments.file, report_fd=arguments.report_fd)


if __name__ == "__main__":
    sys.exit(main())

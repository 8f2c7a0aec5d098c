"""The process behind ``outrider up``: starts Redis, Ray, ranks, drafts and router (``startup``), watches them
(``upkeep``), stops them. Behind ``outrider supervise`` it is ranks and drafts alone: Redis, Ray and routers are other
people's.

``python -m outrider.cluster.supervisor -f FILE [--report-fd N]`` is the detached form; with ``--report-fd`` progress
goes to that pipe as records (see ``report``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

from outrider.cluster.checks import check_models, check_router_port, require_others
from outrider.cluster.config import ClusterConfig, load_config
from outrider.cluster.parts import ClusterParts
from outrider.cluster.report import LogReporter, Reporter, output_to
from outrider.cluster.startup import Startup
from outrider.cluster.state import StateFolder
from outrider.cluster.telemetry import log_settings, trace_settings
from outrider.cluster.upkeep import keep_up
from outrider.core.errors import OutriderError, Unavailable
from outrider.core.logs import Process, configure

log = logging.getLogger("outrider.cluster.supervisor")  # also where this module is the program


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
        """``with_router`` and ``room_timeout_s`` as for ``Startup``."""
        self._stopping = asyncio.Event()
        self._parts = ClusterParts.of(config, settings_file, folder, reporter)
        self._startup = Startup(self._parts, self._take_signals, with_router=with_router, room_timeout_s=room_timeout_s)

    async def run(self) -> None:
        """Start everything, serve until SIGTERM or SIGINT, stop everything.

        Raises ``OutriderError`` if the start fails; what was started by then is stopped.
        """
        self._take_signals()
        try:
            await self._until_stopped(self._startup.start())
            if self._parts.state.phase != "ready":
                raise Unavailable("stopped before the cluster was ready")
            await self._until_stopped(keep_up(self._parts))
        finally:
            await self._stop()

    def _take_signals(self) -> None:
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

    async def _stop(self) -> None:
        """Clients first, then what they stand on. Each part is stopped whatever became of the others."""
        parts = self._parts
        if parts.state.phase == "ready":
            parts.reporter.progress("stopping")
        if parts.router is not None:
            await parts.router.stop()
        if parts.keeping_drafts is not None:
            parts.keeping_drafts.cancel()
            await asyncio.gather(parts.keeping_drafts, return_exceptions=True)
        if parts.drafts is not None:
            await parts.drafts.stop()
        if parts.group is not None:
            await parts.group.stop()
            parts.group.release()
        if parts.ray_started:
            parts.ray.stop()
        if parts.registry is not None:
            await parts.registry.aclose()
        if parts.redis is not None:
            await asyncio.to_thread(parts.redis.stop)
        if parts.listener is not None and parts.telling is not None:
            await parts.listener.stop()
            parts.telling.cancel()
            await asyncio.gather(parts.telling, return_exceptions=True)


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

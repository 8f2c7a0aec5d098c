"""``python -m outrider.router -f CONFIG [--redis URL]``: one router process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from pathlib import Path

from outrider.cluster.config import ClusterConfig, load_config
from outrider.cluster.redis_access import RedisAccess
from outrider.cluster.telemetry import log_settings, trace_settings
from outrider.core.errors import OutriderError
from outrider.core.logs import LEVELS, Process, configure
from outrider.core.tracing import Tracing, connect
from outrider.router.server import RouterServer

log = logging.getLogger("outrider.router")

REDIS_VARIABLE = "OUTRIDER_REDIS_URL"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m outrider.router", description=__doc__)
    parser.add_argument("-f", "--file", type=Path, required=True, help="the cluster's settings file")
    parser.add_argument(
        "--redis",
        default=os.environ.get(REDIS_VARIABLE),
        metavar="URL",
        help=f"where the cluster's Redis is (default: {REDIS_VARIABLE}, which hides a password from other users)",
    )
    parser.add_argument("--router-id", default=None, help="its name in the registry (default: host and a number)")
    parser.add_argument("--grace", type=float, default=5.0, metavar="SECONDS", help="time that SIGTERM gives requests")
    parser.add_argument("--log-level", type=str.lower, choices=LEVELS, help="default: the environment's, or the file's")
    arguments = parser.parse_args(argv)
    if arguments.redis is None:
        parser.error(f"--redis is missing, and {REDIS_VARIABLE} is not set")
    router_id = arguments.router_id or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    log_format = "text"
    try:
        config = load_config(arguments.file)
        logs = log_settings(config, arguments.log_level)
        process = Process("router", router_id, config.cluster)
        configure(logs, process)
        log_format = logs.format
        traces = trace_settings(config)
        tracing = connect(traces, process) if traces is not None else None
        try:
            asyncio.run(serve(config, arguments.redis, router_id, arguments.grace, tracing))
        finally:
            if tracing is not None:
                tracing.close()
    except OutriderError as error:
        if log_format == "json":
            log.error("%s", error)
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(
    config: ClusterConfig, redis_url: str, router_id: str, grace_s: float, tracing: Tracing | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises ``ConfigError`` or ``Unavailable`` if it cannot start."""
    server = RouterServer(config, RedisAccess.of(redis_url, config.redis), router_id=router_id, tracing=tracing)
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    await server.start()
    running = asyncio.create_task(server.run())
    stopping = asyncio.create_task(asked_to_stop.wait())
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if running.done():
        await server.stop(0.0)
        running.result()  # raises what ended it
    log.info("draining: running requests have %g s to finish", grace_s)
    await server.stop(grace_s)
    running.cancel()


if __name__ == "__main__":
    sys.exit(main())

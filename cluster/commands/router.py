"""``outrider router``: one router in the foreground, for a cluster whose other parts run elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.core.errors import ConfigError
from outrider.core.logs import LEVELS

REDIS_VARIABLE = "OUTRIDER_REDIS_URL"


def router(
    file: Annotated[Path, typer.Option("-f", "--file", help="Settings file.", show_default=False)],
    router_id: Annotated[
        str | None,
        typer.Option("--router-id", help="Its name among the routers; else the host's and a number.", metavar="NAME"),
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that SIGTERM gives running requests.", min=0.0)
    ] = 30.0,
    log_level: Annotated[
        str | None,
        typer.Option("--log-level", help="debug, info, warning or error; else the environment's or the file's."),
    ] = None,
) -> None:
    """Run one router here until SIGTERM, which lets running requests finish. Redis must be named by redis.url."""
    from outrider.cluster.config import load_config
    from outrider.cluster.telemetry import quiet_core

    config = load_config(file)
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", **quiet_core(config)}
    if config.redis.url is not None:
        environment[REDIS_VARIABLE] = config.redis.url  # a command line, and a password in it, is for all to read
    elif REDIS_VARIABLE not in environment:
        raise ConfigError(f"{file}: redis.url is missing: a router alone does not start Redis")
    words = ["-f", str(file), "--grace", str(grace)]
    if log_level is not None:
        if log_level.lower() not in LEVELS:
            raise typer.BadParameter(f"must be one of {', '.join(LEVELS)}", param_hint="--log-level")
        words += ["--log-level", log_level]
    if router_id is not None:
        words += ["--router-id", router_id]
    # In place of this process, so that whoever started it sends signals to the router itself.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "outrider.router", *words], environment)

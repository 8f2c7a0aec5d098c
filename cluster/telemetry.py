"""How processes of a cluster log and trace: what settings and environment say, and how actors of Ray hear of it.

An actor's process gets its settings as environment variables, so that they hold before it imports anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict

from outrider.cluster.config import ClusterConfig
from outrider.core.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogSettings, Process, configure, settings_with

PROCESS_VARIABLE = "OUTRIDER_PROCESS"

ActorEnvironment = Callable[[Process], dict[str, str]]


def log_settings(config: ClusterConfig, level: str | None = None) -> LogSettings:
    """``level`` is that of a command line, which goes before all others. Raises ``ConfigError``."""
    settings = settings_with(config.logging.level, config.logging.format, os.environ)
    return settings if level is None else LogSettings(level.lower(), settings.format)


def actor_environment(config: ClusterConfig, process: Process) -> dict[str, str]:
    """The variables that make ``set_up_actor`` in another process do what the settings say."""
    settings = log_settings(config)
    return {
        LEVEL_VARIABLE: settings.level,
        FORMAT_VARIABLE: settings.format,
        PROCESS_VARIABLE: json.dumps(asdict(process)),
    }


def no_environment(process: Process) -> dict[str, str]:
    """For actors that log as Ray has them log, and do not trace."""
    return {}


def set_up_actor() -> None:
    """Log as ``actor_environment`` said; nothing where it said nothing."""
    said = os.environ.get(PROCESS_VARIABLE)
    if said is not None:
        configure(settings_with("info", "text", os.environ), Process(**json.loads(said)))

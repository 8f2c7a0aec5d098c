"""How processes of a cluster log and trace: what settings and environment say, and how actors of Ray hear of it.

An actor's process gets its settings as environment variables, so that they hold before it imports anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict

from outrider.cluster.config import ClusterConfig
from outrider.core import tracing
from outrider.core.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogSettings, Process, configure, settings_with
from outrider.core.tracing import TraceSettings, Tracing

PROCESS_VARIABLE = "OUTRIDER_PROCESS"

ActorEnvironment = Callable[[Process], dict[str, str]]


def log_settings(config: ClusterConfig, level: str | None = None) -> LogSettings:
    """``level`` is that of a command line, which goes before all others. Raises ``ConfigError``."""
    settings = settings_with(config.logging.level, config.logging.format, os.environ)
    return settings if level is None else LogSettings(level.lower(), settings.format)


def trace_settings(config: ClusterConfig) -> TraceSettings | None:
    """None: no spans. Raises ``ConfigError`` where the settings want them and what they need is not installed."""
    return tracing.settings_with(config.tracing.otlp_endpoint, config.tracing.sample_ratio, os.environ)


def quiet_core(config: ClusterConfig) -> dict[str, str]:
    """Variables of a process whose log is JSON: gRPC's core writes lines past every logger, and looks at its import."""
    if log_settings(config).format == "json":
        return {"GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR")}
    return {}


def actor_environment(config: ClusterConfig, process: Process) -> dict[str, str]:
    """The variables that make ``set_up_actor`` in another process do what the settings say.

    Headers for a collector may hold a key, which is not for Ray to keep: where they are needed, the nodes have them.
    """
    settings = log_settings(config)
    variables = {
        LEVEL_VARIABLE: settings.level,
        FORMAT_VARIABLE: settings.format,
        PROCESS_VARIABLE: json.dumps(asdict(process)),
        **quiet_core(config),
    }
    variables |= {key: value for key, value in os.environ.items() if _is_for_actors(key)}
    if config.tracing.otlp_endpoint is not None:
        variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = config.tracing.otlp_endpoint
    return variables


def no_environment(process: Process) -> dict[str, str]:
    """For actors that log as Ray has them log, and do not trace."""
    return {}


def set_up_actor(environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """Log and trace as ``actor_environment`` said; nothing where it said nothing."""
    said = environment.get(PROCESS_VARIABLE)
    if said is None:
        return None
    process = Process(**json.loads(said))
    configure(settings_with("info", "text", environment), process)
    # Whether a request is traced was decided where it came in: what gets here is.
    settings = tracing.settings_with(None, 0.0, environment)
    return tracing.connect(settings, process) if settings is not None else None


def _is_for_actors(variable: str) -> bool:
    return variable.startswith("OTEL_") and "HEADERS" not in variable

"""The log of a process: lines for people or JSON objects, each with what is known of the request that it is about.

Code logs as ever, through ``logging.getLogger(__name__)``. ``bind`` names the request and the epoch that the current
task works for; further fields of one line go into its ``extra``. Nobody logs what clients sent or were sent.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from outrider.core.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
LEVEL_VARIABLE = "OUTRIDER_LOG_LEVEL"
FORMAT_VARIABLE = "OUTRIDER_LOG_FORMAT"

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_epoch: ContextVar[int | None] = ContextVar("epoch", default=None)


@dataclass(frozen=True)
class LogSettings:
    """``level`` is one of ``LEVELS``, ``format`` one of ``FORMATS``."""

    level: str = "info"
    format: str = "text"


@dataclass(frozen=True)
class Process:
    """Who writes a log: what lines of JSON and spans say of their process.

    Attributes:
        role: router, supervisor, target or draft.
        id: its name among those of its role: a router's, a rank, a draft's.
        epoch: of a rank.
    """

    role: str
    id: str
    cluster: str
    epoch: int | None = None


def bind(*, request_id: str | None = None, epoch: int | None = None) -> None:
    """What the current task, and those that it starts, work for from now on."""
    if request_id is not None:
        _request_id.set(request_id)
    if epoch is not None:
        _epoch.set(epoch)


def settings_with(level: str, format: str, environment: Mapping[str, str]) -> LogSettings:
    """The settings, where the environment does not say otherwise. Raises ``ConfigError`` for what it says wrongly."""
    return LogSettings(
        _choice(LEVEL_VARIABLE, LEVELS, environment) or level, _choice(FORMAT_VARIABLE, FORMATS, environment) or format
    )


def configure(settings: LogSettings, process: Process) -> None:
    """Write the log of this process to standard error, from now on and in this form.

    Libraries speak from INFO on; DEBUG is for our own modules.
    """
    handler = _StandardError()
    handler.addFilter(_WithContext(process.epoch))
    handler.setFormatter(json_formatter(process) if settings.format == "json" else logging.Formatter(TEXT_FORMAT))
    root, level = logging.getLogger(), logging.getLevelNamesMapping()[settings.level.upper()]
    for other in [other for other in root.handlers if isinstance(other, _StandardError)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(max(level, logging.INFO))
    logging.getLogger("outrider").setLevel(level)
    logging.captureWarnings(True)
    if settings.format == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread


def json_formatter(process: Process) -> logging.Formatter:
    """One object a line: ``ts``, ``level``, ``logger``, ``message``, who writes, and the fields of ``extra``."""
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "%(levelname)s %(name)s %(message)s",
        timestamp="ts",
        rename_fields={"levelname": "level", "name": "logger"},
        static_fields={"cluster": process.cluster, "role": process.role, "id": process.id},
        json_ensure_ascii=False,
    )


class _StandardError(logging.StreamHandler[Any]):
    """To whatever standard error is at the time: it may be sent to a file meanwhile."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _WithContext(logging.Filter):
    """Adds what the task of a line works for, where the line itself does not say it."""

    def __init__(self, epoch: int | None) -> None:
        super().__init__()
        self._epoch = epoch

    def filter(self, record: logging.LogRecord) -> bool:
        request_id, epoch = _request_id.get(), _epoch.get()
        epoch = self._epoch if epoch is None else epoch
        if request_id and not hasattr(record, "request_id"):
            record.request_id = request_id
        if epoch is not None and not hasattr(record, "epoch"):
            record.epoch = epoch
        return True


def _choice(variable: str, allowed: tuple[str, ...], environment: Mapping[str, str]) -> str:
    value = environment.get(variable, "").lower()
    if value and value not in allowed:
        raise ConfigError(f"{variable} is {value[:40]!r}, but must be one of {', '.join(allowed)}")
    return value


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("outrider").critical("the process ends", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_value is not None and given.exc_type is not SystemExit:
        name = given.thread.name if given.thread is not None else "unknown"
        exc_info = (given.exc_type, given.exc_value, given.exc_traceback)
        logging.getLogger("outrider").critical("the thread %s ended", name, exc_info=exc_info)

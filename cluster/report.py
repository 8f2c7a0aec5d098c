"""How a supervisor tells whoever started it what it is doing: lines on a terminal, or records in a pipe."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Event = Literal["progress", "ready", "error"]


class Reporter:
    """Writes events to a file descriptor, which it owns; a reader that went away is no fault."""

    def __init__(self, descriptor: int, *, as_records: bool) -> None:
        self._descriptor: int | None = descriptor
        self._as_records = as_records
        os.set_inheritable(descriptor, False)

    def progress(self, line: str) -> None:
        self._say("progress", line)

    def ready(self, address: str) -> None:
        """The start went well; ``address`` is the router's. Records end here: whoever waits for them goes on."""
        self._say("ready", address)
        if self._as_records:
            self.close()

    def error(self, line: str) -> None:
        """The start, or what came after it, failed."""
        self._say("error", line)

    def close(self) -> None:
        """Nothing is written from here on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _say(self, event: Event, line: str) -> None:
        if self._descriptor is None:
            return
        if self._as_records:
            text = json.dumps([event, line])
        elif event == "ready":
            text = f"ready: the router listens on {line}"
        else:
            text = f"error: {line}" if event == "error" else line
        try:
            os.write(self._descriptor, f"{text}\n".encode())
        except OSError:
            self.close()


class LogReporter(Reporter):
    """Writes events into a log, for one whose every line is an object."""

    def __init__(self, log: logging.Logger) -> None:
        self._descriptor = None
        self._as_records = False
        self._log = log

    def close(self) -> None:
        """A log is not closed."""

    def _say(self, event: Event, line: str) -> None:
        if event == "ready":
            line = f"ready: the router listens on {line}"
        self._log.log(logging.ERROR if event == "error" else logging.INFO, "%s", line)


def read_record(line: str) -> tuple[Event, str] | None:
    """What ``Reporter`` wrote as a record, or None for anything else."""
    try:
        event, text = json.loads(line)
    except (ValueError, TypeError):
        return None
    return event, text


@contextlib.contextmanager
def output_to(log_file: Path, *, for_good: bool) -> Iterator[None]:
    """Send this process's standard output and error, and those of its children, to a file.

    ``for_good``: nothing of the former ones is kept open, so that whoever reads them sees their end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [] if for_good else [os.dup(1), os.dup(2)]
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)

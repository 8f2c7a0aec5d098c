"""What actors of Ray write, on its way into the supervisor's log.

Ray hands the driver every line that its workers print and would put their names before it. Where a log is to be of JSON
objects, those of our own processes are passed on as they are and all other lines become one.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("outrider.cluster.workers")

HANDLER = "ray_print_logs"  # Ray's own, which it removes when it shuts down
PRINT = "print_to_stdstream"
AUTOSCALER = "autoscaler"  # in place of a number


def log_as_others_do() -> None:
    """What Ray itself logs in this process goes the way of other lines. Once it was imported, which undoes this."""
    rays = logging.getLogger("ray")
    rays.handlers.clear()
    rays.propagate = True


def forward_as_json() -> None:
    """From now on, in this process, which has joined Ray."""
    from ray._private import worker
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    global_worker_stdstream_dispatcher.remove_handler(HANDLER)
    global_worker_stdstream_dispatcher.add_handler(HANDLER, forward)
    # What Ray's node managers tell, such as that a worker was killed, is printed past the dispatcher.
    setattr(worker, PRINT, lambda data, ignore_prefix: forward(data))


def forward(batch: Mapping[str, Any]) -> None:
    """Lines that one process wrote, as Ray describes them.

    The table that Ray's autoscaler prints every few seconds is dropped, as Ray's own way of printing does it too.
    """
    if batch.get("pid") == AUTOSCALER:
        return
    for line in batch.get("lines", ()):
        if is_object(line):
            print(line, file=sys.stderr, flush=True)
        elif line.strip():
            who = {"worker_pid": batch.get("pid"), "actor": batch.get("actor_name"), "node": batch.get("ip")}
            log.info("%s", line.rstrip(), extra={key: value for key, value in who.items() if value})


def is_object(line: str) -> bool:
    """Whether a line is one of a log in JSON."""
    if not line.startswith("{"):
        return False
    try:
        return "ts" in json.loads(line)
    except ValueError:
        return False

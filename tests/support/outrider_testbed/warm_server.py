"""``python warm_server.py SOCKET``: imports what workers import, then forks for each request (see warm.py)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any

LIBRARIES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "deepspeed",
    "deepspeed.comm",
    "deepspeed.ops.op_builder.cpu",
    "outrider.workers.target.shard",
    "outrider.workers.draft.worker",
)
REQUEST_BYTES = 1 << 18


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each request, and report how those processes end. Returns the request in each; None at the end."""
    waking, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    endings: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel, waking], [], [])
        if waking in ready:
            os.read(waking, 512)
            report_ended(endings)
        if channel not in ready:
            continue
        message, files, _, _ = socket.recv_fds(channel, REQUEST_BYTES, 2)
        if not message:
            return None
        log, ending = files
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for file in {log, ending, waking, wake, *endings.values()}:
                os.close(file)
            channel.close()
            request: dict[str, Any] = json.loads(message)
            return request
        os.close(log)
        endings[pid] = ending
        channel.send(str(pid).encode())


def report_ended(endings: dict[int, int]) -> None:
    """Collect all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ending = endings.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody asks any more
                os.write(ending, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(ending)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    for library in LIBRARIES:
        importlib.import_module(library)
    if num_threads() != 1:  # a lock that another thread holds while we fork would stay locked for ever
        raise RuntimeError(f"after the imports there are {num_threads()} threads: no fork is safe")
    gc.collect()
    gc.freeze()
    request = serve(channel)
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

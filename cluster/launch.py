"""Starting and stopping a supervisor from the command line. Neither Ray nor torch is imported here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from outrider.cluster.config import load_config
from outrider.cluster.report import read_record
from outrider.cluster.state import StateFolder, end_process, running_clusters, wait_gone
from outrider.core.errors import ConfigError, NotFound, Unavailable

STOP_TIMEOUT_S = 90.0


def default_settings() -> Path:
    """The settings of the tiny pair that lies in the repository. Raises ``ConfigError`` where that is not at hand."""
    path = Path(__file__).resolve().parent.parent / "examples" / "tiny.yaml"
    if not path.is_file():
        raise ConfigError("name a settings file with -f FILE; examples lie in the folder examples/ of the repository")
    return path


def start_detached(settings_file: Path, progress: Callable[[str], None]) -> str:
    """Start a supervisor of its own session and wait until it is ready: the router's address.

    Raises ``Unavailable`` with the supervisor's own line if it fails, and then nothing is left of it.
    """
    folder = StateFolder(load_config(settings_file).cluster)
    reading, writing = os.pipe()
    command = [sys.executable, "-P", "-m", "outrider.cluster.supervisor", "-f", str(settings_file)]
    with os.fdopen(reading) as records:
        supervisor = subprocess.Popen(
            [*command, "--report-fd", str(writing)],
            stdin=subprocess.DEVNULL,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        try:
            for line in records:
                event, text = read_record(line) or ("progress", line.rstrip())
                if event == "ready":
                    return text
                if event == "error":
                    supervisor.wait()
                    raise Unavailable(text)
                progress(text)
        except BaseException:
            # Interrupted, or failed: nothing half-started stays behind.
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
            raise
    status = supervisor.wait()
    raise Unavailable(f"the supervisor ended with status {status} before it was ready; its log is {folder.log_file}")


def stop(cluster: str) -> bool:
    """Stop a cluster and everything that belongs to it. False if it did not run; what was left over is cleared."""
    folder = StateFolder(cluster)
    pid = folder.supervisor_pid()
    if pid is None:
        if folder.path.is_dir():
            with folder.hold():  # clears
                pass
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    if not wait_gone(pid, STOP_TIMEOUT_S):
        end_process(pid)
        with folder.hold():
            pass
        raise Unavailable(
            f"the supervisor did not stop within {STOP_TIMEOUT_S:g} s and was killed; see {folder.log_file}"
        )
    return True


def choose_cluster(name: str | None, settings_file: Path | None) -> str:
    """The cluster that a command means: by name, by settings file, or the only one that runs.

    Raises ``NotFound`` in one line where that is none or more than one.
    """
    if name is not None:
        return name
    if settings_file is not None:
        return load_config(settings_file).cluster
    running = running_clusters()
    if len(running) == 1:
        return running[0]
    if not running:
        raise NotFound("no cluster is running on this machine; start one with `outrider up`, or name one by --address")
    raise NotFound(f"several clusters are running ({', '.join(running)}); choose one with --cluster NAME")

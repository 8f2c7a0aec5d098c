"""The state folder: one supervisor at a time, whole files, nothing stale."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider.cluster.state import (
    Child,
    ClusterState,
    StateFolder,
    child_of,
    process_start_ticks,
    running_clusters,
    state_root,
    wait_gone,
)
from outrider.core.errors import ConfigError, Conflict, NotFound

HOLDER = """
import sys, time
from outrider.cluster.state import ClusterState, StateFolder, child_of
import os
folder = StateFolder("c")
with folder.hold():
    folder.write(ClusterState("c", os.getpid(), "ready", children=(child_of("redis-server", int(sys.argv[1])),),
                              scratch=(sys.argv[2],)))
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def test_nothing_runs_at_first(root: Path) -> None:
    folder = StateFolder("c")
    assert folder.supervisor_pid() is None
    assert folder.read() is None
    assert running_clusters() == []
    with pytest.raises(NotFound, match="outrider up"):
        folder.require_running()


def test_the_second_supervisor_is_refused_in_one_line(root: Path) -> None:
    with StateFolder("c").hold():
        with pytest.raises(Conflict) as caught, StateFolder("c").hold():
            raise AssertionError("held twice")
        assert f"process {os.getpid()}" in str(caught.value)
        assert "outrider down" in str(caught.value)
        assert running_clusters() == ["c"]
        with StateFolder("other").hold():
            assert running_clusters() == ["c", "other"]
    assert running_clusters() == []
    with StateFolder("c").hold():
        pass


def test_only_a_ready_cluster_is_running(root: Path) -> None:
    folder = StateFolder("c")
    state = ClusterState("c", os.getpid(), "starting", redis_url="redis://h")
    with folder.hold():
        with pytest.raises(NotFound, match="still starting"):
            folder.require_running()
        folder.write(state)
        with pytest.raises(NotFound, match="still starting"):
            folder.require_running()
        ready = ClusterState("c", os.getpid(), "ready", router_address="127.0.0.1:1", children=(Child("r", 1, 2),))
        folder.write(ready)
        assert StateFolder("c").require_running() == ready
    assert folder.read() is None


def test_what_a_killed_supervisor_left_is_cleared(root: Path, tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "deep").mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(sleeper.pid), str(scratch)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    folder = StateFolder("c")
    assert folder.supervisor_pid() == holder.pid
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    assert folder.supervisor_pid() is None
    with pytest.raises(NotFound, match="not running"):
        folder.require_running()
    assert process_start_ticks(sleeper.pid) is not None
    with folder.hold():
        assert sleeper.wait(10) == -signal.SIGTERM
        assert folder.read() is None
        assert not scratch.exists()


def test_a_process_number_in_use_again_is_left_alone(root: Path, sleeper: subprocess.Popen[bytes]) -> None:
    folder = StateFolder("c")
    folder.path.mkdir(parents=True)
    child = child_of("router", sleeper.pid)
    folder.write(ClusterState("c", 1, "ready", children=(Child("router", child.pid, child.start_ticks - 1),)))
    with folder.hold():
        assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    assert wait_gone(sleeper.pid, 1.0)
    with pytest.raises(ProcessLookupError):
        child_of("router", sleeper.pid)


def test_a_reader_never_sees_half_a_file(root: Path) -> None:
    folder = StateFolder("c")
    stop = threading.Event()
    with folder.hold():
        folder.write(ClusterState("c", 0, "starting"))

        def rewrite() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                folder.write(ClusterState("c" * 5000, number, "ready"))

        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            for _ in range(200):
                state = folder.read()
                assert state is not None
                assert state.phase == ("starting" if state.supervisor_pid == 0 else "ready")
        finally:
            stop.set()
            writer.join()
        assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "state.json"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="OUTRIDER_STATE_DIR"), StateFolder("c").hold():
        pass


def test_a_damaged_file_is_named(root: Path) -> None:
    folder = StateFolder("c")
    folder.path.mkdir(parents=True)
    (folder.path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json is damaged"):
        folder.read()


def test_the_folder_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_root() == tmp_path / "xdg" / "outrider"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_root() == Path.home() / ".local" / "state" / "outrider"

"""``outrider router`` and ``outrider supervise``: parts of a cluster that others complete."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cluster import startup, supervisor
from outrider.cluster.cli import app
from outrider.cluster.config import parse_config
from outrider.cluster.parts import ClusterParts
from outrider.cluster.placement import NodeFacts
from outrider.cluster.report import Reporter
from outrider.cluster.state import StateFolder
from outrider.core.errors import ConfigError, Unavailable

APART = """
redis: {url: "redis://:secret@redis:6379/0"}
ray: {address: "127.0.0.1:6379"}
target: {model: target, tensor_parallel_size: 2, resources: {target: 1}}
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "outrider.yaml"
    file.write_text(text)
    return file


def test_a_router_takes_the_place_of_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: called.append(call))
    file = write(tmp_path, APART)
    done = CliRunner().invoke(app, ["router", "-f", str(file), "--grace", "12", "--router-id", "router-a"])
    assert done.exit_code == 0, done.output
    [(program, words, environment)] = called
    assert words[0] == program
    assert words[1:] == [
        *("-P", "-m", "outrider.router", "-f", str(file)),
        *("--grace", "12.0", "--router-id", "router-a"),
    ]
    assert environment["OUTRIDER_REDIS_URL"] == "redis://:secret@redis:6379/0"


def test_a_router_alone_needs_a_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_REDIS_URL", raising=False)
    done = CliRunner().invoke(app, ["router", "-f", str(write(tmp_path, "target: {model: target}"))])
    assert isinstance(done.exception, ConfigError)
    assert "redis.url is missing" in str(done.exception)


@pytest.mark.parametrize("missing", ["redis", "ray"])
def test_what_supervise_does_not_start_must_be_named(
    tmp_path: Path, missing: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in APART.splitlines() if not line.startswith(f"{missing}:")]
    assert supervisor.supervise(write(tmp_path, "\n".join(lines)), apart=True) == 1
    assert f"{missing}." in capfd.readouterr().err


class RayThatGrows:
    """One more node with room for one rank each time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def nodes(self) -> list[NodeFacts]:
        self.asked += 1
        has = {"CPU": 1.0, "target": 1.0}
        return [NodeFacts(f"node-{i}", f"10.0.0.{i}", 1, has, has) for i in range(self.asked)]


@pytest.mark.parametrize(("room_timeout_s", "asked"), [(60.0, 2), (0.0, 1)])
def test_the_target_waits_for_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_timeout_s: float, asked: int
) -> None:
    monkeypatch.setattr(startup, "ROOM_POLL_S", 0.0)
    config = parse_config(APART, base=tmp_path)
    reporter = Reporter(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), as_records=False)
    parts: Any = ClusterParts.of(config, tmp_path, StateFolder("x"), reporter)
    parts.ray = ray = RayThatGrows()
    starting = startup.Startup(parts, lambda: None, with_router=False, room_timeout_s=room_timeout_s)
    placement = asyncio.run(starting.room())
    reporter.close()
    assert len(placement.bundles) == 2
    assert ray.asked == asked


class RayThatComes:
    """Does not answer until it was asked a few times."""

    scratch = None
    address = "127.0.0.1:6379"

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def prepare(self) -> None:
        pass

    def start(self, num_actors: int) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("Ray at 127.0.0.1:6379 does not answer")


@pytest.mark.parametrize("room_timeout_s", [60.0, 0.0])
def test_the_supervisor_waits_for_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_timeout_s: float) -> None:
    monkeypatch.setattr(startup, "ROOM_POLL_S", 0.0)
    monkeypatch.setenv("OUTRIDER_STATE_DIR", str(tmp_path))
    folder = StateFolder("x")
    folder.path.mkdir(parents=True, exist_ok=True)
    reporter = Reporter(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), as_records=False)
    parts: Any = ClusterParts.of(parse_config(APART, base=tmp_path), tmp_path, folder, reporter)
    parts.ray = ray = RayThatComes(3)
    taken: list[None] = []
    starting = startup.Startup(parts, lambda: taken.append(None), with_router=False, room_timeout_s=room_timeout_s)

    if room_timeout_s:
        asyncio.run(starting.start_ray())
        assert len(taken) == 4  # after each time that Ray may have taken the signals
        assert ray.failures == 0
        assert (tmp_path / "log").read_text().count("waiting for Ray: Ray at 127.0.0.1:6379 does not answer") == 1
    else:
        with pytest.raises(Unavailable):
            asyncio.run(starting.start_ray())
    reporter.close()


def test_the_level_of_a_log_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: called.append(call))
    file = write(tmp_path, APART)
    done = CliRunner().invoke(app, ["router", "-f", str(file), "--log-level", "LOUD"])
    assert done.exit_code == 2
    assert not called
    done = CliRunner().invoke(app, ["router", "-f", str(file), "--log-level", "INFO"])
    assert done.exit_code == 0, done.output
    assert called[0][1][-2:] == ["--log-level", "INFO"]

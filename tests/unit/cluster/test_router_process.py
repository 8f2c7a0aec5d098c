"""How the supervisor starts a router."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import ClusterConfig
from outrider.cluster.router_process import RouterProcess


def test_the_password_of_redis_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of a machine can read the command lines of all its processes, but not their environments."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        started.append((command, env))

    monkeypatch.setattr(subprocess, "Popen", popen)
    config = ClusterConfig.model_validate({"target": {"model": "/m"}})
    url = "redis://:secret@10.0.0.1:6379/0"
    RouterProcess(config, tmp_path, url).launch()
    ((command, env),) = started
    assert "secret" not in " ".join(command)
    assert env["OUTRIDER_REDIS_URL"] == url

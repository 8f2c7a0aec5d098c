"""Lines of Ray's workers in a log of JSON objects, and what actors are told of logs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from outrider.cluster import telemetry
from outrider.cluster.config import parse_config
from outrider.cluster.report import LogReporter
from outrider.cluster.worker_logs import forward
from outrider.core.logs import LogSettings, Process

CONFIG = "target: {model: m}\nlogging: {level: DEBUG, format: json}"


def test_objects_pass_and_other_lines_become_some(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    line = '{"level": "INFO", "message": "ready", "ts": "2026-01-01T00:00:00+00:00"}'
    forward(
        {
            "lines": [line, "", "{no object}", '{"other": 1}', "plain\r"],
            "pid": 7,
            "actor_name": "Draft",
            "ip": "10.0.0.1",
        }
    )
    assert capsys.readouterr().err == line + "\n"
    assert [record.getMessage() for record in caplog.records] == ["{no object}", '{"other": 1}', "plain"]
    assert {(record.worker_pid, record.actor) for record in caplog.records} == {(7, "Draft")}  # type: ignore[attr-defined]


def test_the_table_of_rays_autoscaler_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    forward({"lines": ["======== Autoscaler status ========"], "pid": "autoscaler", "ip": "10.0.0.1"})
    assert caplog.records == []


def test_rays_own_way_of_printing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Planted where Ray has it; it names the workers in front of every line."""
    rays = logging.getLogger("ray")
    monkeypatch.setattr(rays, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(rays, "propagate", False)
    from ray._private import worker
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    from outrider.cluster.worker_logs import HANDLER, PRINT, forward_as_json, log_as_others_do

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker, PRINT, getattr(worker, PRINT))  # there, and put back afterwards
    dispatcher.add_handler(HANDLER, print)
    try:
        forward_as_json()
        log_as_others_do()
        assert [handler for name, handler in dispatcher.handlers if name == HANDLER] == [forward]
        assert (rays.handlers, rays.propagate) == ([], True)
        told = {"lines": ["A worker died or was killed"], "pid": "raylet", "is_err": False}
        getattr(worker, PRINT)(told, ignore_prefix=False)  # as Ray calls it
        assert [record.getMessage() for record in caplog.records] == ["A worker died or was killed"]
        assert "killed" not in capsys.readouterr().out
    finally:
        dispatcher.remove_handler(HANDLER)


def test_an_actor_logs_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process("target", "1", "demo", 4)
    variables = telemetry.actor_environment(parse_config(CONFIG, base=Path()), process)
    configured: list[tuple[LogSettings, Process]] = []
    monkeypatch.setattr(telemetry, "configure", lambda *args: configured.append(args))
    telemetry.set_up_actor()
    assert configured == []  # no variables, nothing to do
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    telemetry.set_up_actor()
    assert configured == [(LogSettings("debug", "json"), process)]


def test_the_environment_of_the_supervisor_reaches_its_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_LOG_LEVEL", "error")
    variables = telemetry.actor_environment(parse_config(CONFIG, base=Path()), Process("draft", "d", "demo"))
    assert (variables["OUTRIDER_LOG_LEVEL"], variables["OUTRIDER_LOG_FORMAT"]) == ("error", "json")
    assert json.loads(variables["OUTRIDER_PROCESS"])["id"] == "d"


def test_progress_is_a_part_of_such_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reporter = LogReporter(logging.getLogger("outrider.test"))
    reporter.progress("loading")
    reporter.ready("h:1")
    reporter.error("lost")
    reporter.close()
    reporter.progress("stopping")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "loading"),
        ("INFO", "ready: the router listens on h:1"),
        ("ERROR", "lost"),
        ("INFO", "stopping"),
    ]


def test_the_core_of_grpc_is_quiet_where_lines_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    monkeypatch.delenv("OUTRIDER_LOG_FORMAT", raising=False)
    assert telemetry.quiet_core(parse_config(CONFIG, base=Path())) == {"GRPC_VERBOSITY": "ERROR"}
    assert telemetry.quiet_core(parse_config("target: {model: m}", base=Path())) == {}
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    assert telemetry.quiet_core(parse_config(CONFIG, base=Path())) == {"GRPC_VERBOSITY": "DEBUG"}

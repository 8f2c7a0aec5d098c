"""The doctor looks and says what is missing; it changes nothing."""

from __future__ import annotations

import json
import sys

import pytest

from outrider.cluster import cli, doctor
from outrider.cluster.doctor import Finding, examine


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["outrider", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_this_machine_is_fit_for_the_tests() -> None:
    findings = {finding.name: finding for finding in examine()}
    for name in ("python", "torch", "ray", "deepspeed", "redis-server", "shared memory", "cores", "memory"):
        assert name in findings
    assert [finding.name for finding in findings.values() if finding.needed and not finding.ok] == []


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "doctor", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    assert {"name", "ok", "needed", "found", "advice"} <= set(answer["checks"][0])


def test_what_is_missing_is_said_with_what_to_do_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        Finding("torch", False, True, "not installed", "pip install torch"),
        Finding("compiler", False, False, "not found", "install g++"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert run(monkeypatch, "doctor") == 1
    shown = capsys.readouterr()
    assert "MISSING torch" in shown.out
    assert "pip install torch" in shown.out
    assert "note    compiler" in shown.out
    assert shown.err == "error: missing: torch; see above for what to do\n"
    assert run(monkeypatch, "doctor", "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_package_that_is_not_there_is_found_missing() -> None:
    finding = doctor._package("no_such_package_at_all", "advice")
    assert (finding.ok, finding.needed, finding.found) == (False, True, "not installed")

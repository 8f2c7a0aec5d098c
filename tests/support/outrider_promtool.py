"""Prometheus' own checks, and a Prometheus that scrapes what a test runs."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECK_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0


@functools.cache
def tools() -> Path:
    """The folder of promtool and prometheus; skips the test, with the reason, where there are none to be had."""
    done = subprocess.run(
        [ROOT / "scripts" / "prometheus.sh"], capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no promtool: {done.stderr.strip()}")
    return Path(done.stdout.strip())


def promtool_check(text: str) -> None:
    """``promtool check metrics`` has nothing to say about a scrape."""
    done = subprocess.run(
        [tools() / "promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert (done.returncode, said) == (0, ""), f"promtool: {said}"


def check_rules(groups: dict[str, Any], folder: Path) -> str:
    """What ``promtool check rules`` says about groups of rules that are right."""
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(groups))
    done = subprocess.run(
        [tools() / "promtool", "check", "rules", "--lint=all", "--lint-fatal", file],
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A running one; ask it with ``query``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def api(self, path: str, **parameters: str) -> Any:
        """What its API answers; an answer that is no success fails."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        data = self.api("query", query=expression)
        series: list[dict[str, Any]] = data["result"]
        return series


@contextlib.contextmanager
def running_prometheus(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """A Prometheus on a free port of this machine, until the end of the block."""
    file, log_file = folder / "prometheus.yaml", folder / "prometheus.log"
    file.write_text(yaml.safe_dump(config))
    words = [
        tools() / "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--log.format=logfmt",
    ]
    with log_file.open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(_address(process, log_file))
    finally:
        process.kill()  # it keeps nothing that anybody wants
        process.wait(30)


def _address(process: subprocess.Popen[bytes], log_file: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        text = log_file.read_text()
        match = re.search(r'msg="Listening on" address=(\S+)', text)
        if match is not None and "Server is ready to receive web requests" in text:
            return f"http://{match[1]}"
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)

"""The log of a process, as its standard error has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from outrider.core.errors import ConfigError
from outrider.core.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogSettings, settings_with

BEGIN = """
import asyncio, contextvars, logging, threading, warnings
from outrider.core.logs import LogSettings, Process, bind, configure
configure(LogSettings({level!r}, {format!r}), Process("router", "r-1", "demo", {epoch}))
log = logging.getLogger("outrider.somewhere")
"""


def written(code: str, level: str = "info", format: str = "json", epoch: int | None = None) -> list[str]:
    """What a process writes to standard error."""
    program = BEGIN.format(level=level, format=format, epoch=epoch) + code
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_LOG")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def objects(*args: Any, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written(*args, **options)]


def test_a_line_of_json_says_who_writes_and_what_it_is_about() -> None:
    code = """
async def one(name, epoch):
    bind(request_id=name)
    await asyncio.sleep(0)
    bind(epoch=epoch)
    log.info("of %s", name)
async def main():
    await asyncio.gather(one("a", 1), one("b", 2))
    log.info("of none")
asyncio.run(main())
log.warning("with fields", extra={"status": "OK", "request_id": "own"})
"""
    a, b, none, own = objects(code)
    assert {key: a[key] for key in ("level", "logger", "message", "cluster", "role", "id", "request_id", "epoch")} == {
        "level": "INFO",
        "logger": "outrider.somewhere",
        "message": "of a",
        "cluster": "demo",
        "role": "router",
        "id": "r-1",
        "request_id": "a",
        "epoch": 1,
    }
    assert datetime.fromisoformat(a["ts"]).tzinfo is not None
    assert (b["request_id"], b["epoch"]) == ("b", 2)
    assert not {"request_id", "epoch"} & none.keys()
    assert (own["status"], own["request_id"], own["level"]) == ("OK", "own", "WARNING")


def test_every_line_is_an_object() -> None:
    """Also of libraries, warnings, and what ends a thread or the process; several lines of text are one of the log."""
    code = """
logging.getLogger("uvicorn.error").info("Started")
warnings.warn("old")
log.error("two\\nlines")
def fail():
    raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="worker"); thread.start(); thread.join()
raise RuntimeError("at last")
"""
    lines = objects(code, epoch=7)
    assert [line["message"].partition("\n")[0] for line in lines[:1] + lines[2:]] == [
        "Started",
        "two",
        "the thread worker ended",
        "the process ends",
    ]
    assert lines[1]["logger"] == "py.warnings"
    assert "ValueError: in a thread" in lines[3]["exc_info"]
    assert "RuntimeError: at last" in lines[4]["exc_info"]
    assert {line["epoch"] for line in lines} == {7}


@pytest.mark.parametrize(
    ("level", "heard"), [("debug", ["d", "i", "w", "i2"]), ("info", ["i", "w", "i2"]), ("error", [])]
)
def test_levels_hold_for_our_modules_and_libraries_stay_quiet(level: str, heard: list[str]) -> None:
    code = """
log.debug("d"); log.info("i"); log.warning("w")
logging.getLogger("asyncio").debug("d2"); logging.getLogger("asyncio").info("i2")
"""
    assert [line["message"] for line in objects(code, level)] == heard


def test_text_is_for_people() -> None:
    [line] = written("log.info('hello')", format="text")
    assert line.endswith(" INFO outrider.somewhere: hello")


def test_the_environment_goes_before_the_settings() -> None:
    assert settings_with("info", "text", {}) == LogSettings("info", "text")
    variables = {LEVEL_VARIABLE: "WARNING", FORMAT_VARIABLE: "json"}
    assert settings_with("info", "text", variables) == LogSettings("warning", "json")
    for variable, limit in ((LEVEL_VARIABLE, "debug, info, warning, error"), (FORMAT_VARIABLE, "text, json")):
        with pytest.raises(ConfigError, match=f"{variable} is 'loud', but must be one of {limit}"):
            settings_with("info", "text", {variable: "loud"})

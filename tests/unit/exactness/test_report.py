"""Verdicts, and what a report shows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider.exactness import prompts
from outrider.exactness.report import Report, Speculation, Verdict
from outrider.exactness.rows import Counts

SPECULATION = Speculation("coupled", 4, num_tokens=1000, num_speculated=600, num_proposed=900, num_accepted=300)
REPORT = Report(
    settings={"temperature": 0.8},
    counts=Counts(judged=1000, forced=5, uncertain=3, on_border=1, uncertain_mass=0.25),
    num_texts=20,
    num_prompts=16,
    num_plain_texts=5,
    wanted_deviation=0.02,
    smallest_deviation=0.14,
    speculation=SPECULATION,
    p_values={"u by likelihood": 0.3, "cells of rank": 0.7},
)


def test_the_verdict() -> None:
    assert REPORT.verdict is Verdict.PASSED
    assert replace(REPORT, doubts=["too few"]).verdict is Verdict.UNKNOWN
    assert replace(REPORT, faults=["wrong"], doubts=["too few"]).verdict is Verdict.FAILED
    failed = replace(REPORT, p_values={"u by likelihood": 1e-7})
    assert failed.verdict is Verdict.FAILED
    assert failed.failed_tests == ["u by likelihood"]
    assert [verdict.exit_code for verdict in (Verdict.PASSED, Verdict.FAILED, Verdict.UNKNOWN)] == [0, 1, 2]


def test_what_must_be_seen_of_speculation() -> None:
    assert SPECULATION.missing(20, 0.05) is None
    assert replace(SPECULATION, num_speculative_tokens=0, num_proposed=0).missing(20, 0.05) is None
    cases = {
        "0 proposed": replace(SPECULATION, num_proposed=0, num_accepted=0),
        "3 accepted": replace(SPECULATION, num_accepted=3),
        "0 rejected": replace(SPECULATION, num_accepted=900),
        "1.0% of the tokens": replace(SPECULATION, num_speculated=10),
    }
    for words, speculation in cases.items():
        assert words in (speculation.missing(20, 0.05) or "")


def test_the_json_and_the_table() -> None:
    facts = json.loads(json.dumps(REPORT.to_dict()))
    assert facts["verdict"] == "passed"
    assert facts["tokens"] == {
        "judged": 1000,
        "forced": 5,
        "uncertain": 3,
        "on_border": 1,
        "impossible": 0,
        "uncertain_mass": 0.25,
    }
    assert facts["speculation"]["acceptance_rate"] == pytest.approx(1 / 3)
    assert [test["name"] for test in facts["tests"]] == ["u by likelihood", "cells of rank"]
    assert facts["tests"][0]["adjusted"] == 1.0
    shown = replace(REPORT, faults=["one thing"], doubts=["another"]).table()
    assert shown.splitlines()[-1] == "failed"
    assert "fault: one thing" in shown
    assert "doubt: another" in shown


def test_prompts(tmp_path: Path) -> None:
    one, two = (list(islice(prompts.built_in(seed), 50)) for seed in (1, 1))
    assert one == two
    assert one != list(islice(prompts.built_in(2), 50))
    found = prompts.different(prompts.built_in(0), lambda text: [len(word) for word in text.split()], 30)
    assert len(set(found)) == len(found) == 30
    assert prompts.different(iter(["a", "a", "b"]), lambda text: [ord(text)], 5) == [(97,), (98,)]
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n second\n")
    assert prompts.from_file(file) == ["first", " second"]
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        prompts.from_file(file)
    with pytest.raises(ConfigError, match="cannot read"):
        prompts.from_file(tmp_path / "none")

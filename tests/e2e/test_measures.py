"""The measuring scripts on a running cluster: one JSON object, and one line where something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0  # of one script, on a busy machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def script(name: str, address: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(ROOT / "scripts" / name), *words, "--address", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def facts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    (line,) = done.stdout.splitlines()
    answer: dict[str, Any] = json.loads(line)
    return answer


def test_the_scripts_give_their_figures_or_one_line(running_cluster: Any, tmp_path: Path) -> None:
    address = running_cluster.address
    compare(address, tmp_path / "texts.json")
    measure(address)
    for words, why in (
        (("prefix", "--prefix-tokens", "9000"), "the context holds"),
        (("oversubscribed", "--prompt-tokens", "99999"), "ask for shorter ones"),
    ):
        done = script("measure_serving.py", address, *words)
        assert done.returncode == 3
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert why in done.stderr


def compare(address: str, kept: Path) -> None:
    """Equal texts in each way, and the first difference where there is one."""
    words = ("-n", "3", "--max-tokens", "12", "--others", "2")
    done = script("compare_texts.py", address, *words, "--save", str(kept))
    seen = facts(done)
    assert seen["verdict"] in ("passed", "unknown"), done.stdout  # drafts may be late, or never wrong
    assert done.returncode == (0 if seen["verdict"] == "passed" else 2)
    assert {name: (way["texts"], way["equal"]) for name, way in seen["ways"].items()} == {
        "plain-alone": (3, 3),
        "plain-among": (5, 5),
        "speculative-alone": (3, 3),
        "speculative-among": (5, 5),
    }
    assert all(way["proposed"] == 0 for name, way in seen["ways"].items() if name.startswith("plain"))

    texts = json.loads(kept.read_text())
    wrong = texts["texts"][1][0] + 1
    texts["texts"][1][0] = wrong
    kept.write_text(json.dumps(texts))
    again = ("--ways", "plain-alone", "--against", str(kept))
    done = script("compare_texts.py", address, *words, *again)
    assert done.returncode == 1
    assert facts(done)["ways"]["plain-alone"]["differences"] == [
        {"prompt": 1, "position": 0, "reference": wrong, "found": wrong - 1}
    ]


def measure(address: str) -> None:
    """One small run of each mode."""
    arms = facts(script("measure_serving.py", address, "prefix", "--prefix-tokens", "200", "--pairs", "1"))["arms"]
    assert list(arms) == ["plain", "k=4"]
    for arm in arms.values():
        (pair,) = arm["pairs"]
        assert pair["second_prompt_tokens"] > pair["first_prompt_tokens"] > 100
        assert arm["second_over_first"]["p50"] == pair["ratio"] > 0

    words = ("--streams", "2", "--prompt-tokens", "200", "--rounds", "1", "--quiet-messages", "4", "-k", "0")
    (arm,) = facts(script("measure_serving.py", address, "entering", *words))["arms"].values()
    assert arm["entering_s"]["count"] == 1
    assert arm["prompt_tokens"][0] > 100
    assert arm["before"]["message_gap_ms"]["count"] >= 2

    done = script("measure_serving.py", address, "oversubscribed", "--factor", "0.05", "--max-tokens", "8")
    seen = facts(done)
    assert done.returncode == 0, done.stdout
    assert seen["requests"] == seen["equal_texts"] > 1
    assert seen["preemptions"] >= 0

    words = ("--streams", "4", "--max-tokens", "4", "--blocks", "1")
    speeds = facts(script("measure_serving.py", address, "batch", *words))["tokens_per_s"]
    assert list(speeds) == ["one stream, plain", "4 streams, plain", "4 streams, k=4"]

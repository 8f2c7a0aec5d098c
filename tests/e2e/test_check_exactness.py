"""``check-exactness`` against real processes: what is exact passes, planted faults fail, too little is unknown.

The deviation looked for is 0.2, so that a check takes some hundred tokens. False alarms: 1e-3 for each check that must
pass. The faults move more than that in the rows that they touch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cluster.cli import app
from outrider.exactness.check import Check, run
from outrider.exactness.report import Report, Verdict
from outrider_testbed import TINY, Cluster, Testbed

pytestmark = pytest.mark.slow

SIZE = 0.2


@pytest.fixture(scope="module")
def cluster(testbed: Testbed) -> Iterator[Cluster]:
    """One rank and the tiny draft. Its steps take as long as those of a larger model, so that drafts are in time: under
    rejection a late proposal fits by chance only."""
    target = testbed.target("one")
    with testbed.cluster(target, (testbed.draft("tiny"),)) as cluster:
        target.leader.call("slow_down", 0.03)
        yield cluster
        target.leader.call("slow_down", 0.0)


def check(cluster: Cluster, options: dict[str, Any], **more: Any) -> Report:
    settings = {"concurrency": 8, "deviation": SIZE, "draft": TINY / "draft", **more}
    return run(Check(cluster.address, TINY / "target", {"max_tokens": 40, **options}, **settings))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2, "logprobs": 2},
        {"verifier": "rejection", "min_p": 0.01, "frequency_penalty": 0.5, "logit_bias": {"100": 3.0}},
        {"temperature": 0.0, "frequency_penalty": 1.0, "max_tokens": 20},
    ],
    ids=["coupled", "rejection", "greedy"],
)
def test_an_exact_server_passes(cluster: Cluster, options: dict[str, Any]) -> None:
    report = check(cluster, options, tokens=200 if options.get("temperature") == 0.0 else None)
    print(report.table())
    assert report.verdict is Verdict.PASSED, report.table()
    assert report.smallest_deviation <= SIZE
    assert report.num_plain_texts > 0
    compared = any(name.startswith("with and without") for name in report.p_values)
    assert compared == (options.get("verifier") == "rejection")


@pytest.mark.parametrize(
    ("fault", "options", "tokens"),
    [
        ("temperature_forgotten", {"temperature": 0.5, "verifier": "rejection"}, None),
        # Found by the texts that the same seeds give without speculation.
        ("penalties_once_a_step", {"frequency_penalty": -2.0}, 500),
        ("bonus_by_the_row_before", {"temperature": 0.0}, 200),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_fault_fails(
    testbed: Testbed, cluster: Cluster, fault: str, options: dict[str, Any], tokens: int | None
) -> None:
    leader = testbed.target("one").leader
    leader.call("plant", fault)
    try:
        report = check(cluster, options, tokens=tokens)
    finally:
        leader.call("plant", None)
    print(fault, report.table())
    assert report.verdict is Verdict.FAILED, report.table()


def test_too_little_is_unknown(cluster: Cluster) -> None:
    report = check(cluster, {"num_speculative_tokens": 0}, tokens=100)
    assert report.verdict is Verdict.UNKNOWN
    assert "tokens were judged" in report.doubts[0]
    greedy = check(cluster, {"temperature": 0.0, "max_tokens": 10}, tokens=10)
    assert greedy.verdict is Verdict.UNKNOWN
    assert "tokens were judged" in greedy.doubts[0]


def test_a_run_without_rejections_or_without_proposals_is_unknown(testbed: Testbed, cluster: Cluster) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 20}
    try:
        cluster.use_drafts(testbed.draft("target"))  # always guesses right
        report = check(cluster, greedy, tokens=100)
        assert report.verdict is Verdict.UNKNOWN
        assert "0 rejected" in report.doubts[0]
        cluster.use_drafts()
        report = check(cluster, greedy, tokens=100)
        assert report.verdict is Verdict.UNKNOWN
        assert "0 proposed" in report.doubts[0]
        # Where no speculation is asked for, none must be seen.
        report = check(cluster, {**greedy, "num_speculative_tokens": 0}, tokens=100)
        assert report.verdict is Verdict.PASSED, report.table()
        assert report.num_plain_texts == 0
    finally:
        cluster.use_drafts(testbed.draft("tiny"))


def test_the_command_tells_its_verdict_by_its_exit_code(cluster: Cluster) -> None:
    where = ["check-exactness", "--model", str(TINY / "target"), "--address"]
    runner = CliRunner()
    settings = ["--temperature", "0", "--bad-words", "the", "--max-tokens", "20", "--deviation", "0.05"]
    passed = runner.invoke(app, [*where, cluster.address, *settings, "--tokens", "300", "--json"])
    assert passed.exit_code == 0, passed.output
    facts = json.loads(passed.stdout)
    assert facts["verdict"] == "passed"
    assert facts["settings"]["bad_words"] == ["the"]
    assert facts["tokens"]["judged"] >= 90
    assert 0 < facts["speculation"]["acceptance_rate"] < 1
    unknown = runner.invoke(app, [*where, cluster.address, "--sampling", '{"temperature": 0}', "--tokens", "60"])
    assert unknown.exit_code == 2, unknown.output
    assert unknown.stdout.rstrip().endswith("unknown")
    for address, option, words in (
        (cluster.address, ["--sampling", '{"top_p": 0}'], "--top-p is 0"),
        (cluster.address, ["--sampling", '{"top_q": 0}'], "top_q"),
        ("127.0.0.1:1", [], "127.0.0.1:1"),
    ):
        refused = runner.invoke(app, [*where, address, *option])
        assert refused.exit_code == 3, refused.output
        assert refused.stdout == ""
        assert words in refused.stderr

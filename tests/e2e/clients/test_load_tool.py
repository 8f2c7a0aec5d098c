"""AIPerf, where it is installed, finds in the answers what the server counted itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider_testbed import Cluster, Testbed

AIPERF = os.environ.get("AIPERF") or shutil.which("aiperf")
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "load_tool.sh"
LOAD = "--concurrency 2 --request-count 6 --isl 48 --osl 48 --extra-inputs ignore_eos:true --random-seed 7"
TIMEOUT_S = 200.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(AIPERF is None, reason="aiperf is missing; it takes more than a gigabyte (docs/benchmarks.md)"),
]


@pytest.fixture(scope="module")
def cluster(testbed: Testbed) -> Iterator[Cluster]:
    # Looked up within the router, so that something is proposed however late a draft would be.
    speculation = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with testbed.cluster(testbed.target("one"), (), speculation=speculation) as cluster:
        yield cluster


def test_acceptance_figures_are_the_servers(cluster: Cluster, tmp_path: Path) -> None:
    environment = {**os.environ, "AIPERF": str(AIPERF), "OUT": str(tmp_path)}
    command = [str(SCRIPT), cluster.status()["http_url"], *LOAD.split()]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Accepted drafts per step" in done.stdout
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 6
    assert not found["error_summary"]
    assert found["total_usage_completion_tokens"]["avg"] == 6 * 48
    (group,) = cluster.status()["groups"]
    assert found["total_draft_tokens"]["avg"] == group["lookup_draft_tokens"] > 0
    assert found["total_accepted_draft_tokens"]["avg"] == group["lookup_accepted_tokens"]
    histogram = {int(number): count for number, count in found["pooled_spec_decode_acceptance_histogram"].items()}
    assert sum(number * count for number, count in histogram.items()) == group["lookup_accepted_tokens"]

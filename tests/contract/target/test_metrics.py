"""What ranks and draft workers tell of a run that really happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from outrider.client import Client
from outrider.workers.draft.metrics import DRAFT
from outrider.workers.target.metrics import RANK
from outrider_promtool import promtool_check


def names(text: str) -> set[str]:
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}


def values(text: str) -> dict[str, float]:
    """Samples without their labels' names, as ``name`` or ``name value``."""
    return {
        " ".join([sample.name, *(value for key, value in sample.labels.items() if key != "le")]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.removesuffix("_bucket") == sample.name
    }


def settled(tell: Callable[[], str], steps: str, *counts: str) -> str:
    """What a worker tells once its step thread has counted the last step everywhere."""
    deadline = time.monotonic() + 60
    while True:
        text = tell()
        now = values(text)
        if all(now[count] == now[steps] for count in counts):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def test_ranks_and_drafts_tell_what_they_did(testbed: Any) -> None:
    target, draft = testbed.target("two"), testbed.draft()
    before = [values(rank.call("metrics")) for rank in target.ranks]
    drafted = values(draft.host.call("metrics"))
    with testbed.cluster(target, (draft,)) as cluster, Client(cluster.address, timeout=60) as client:
        answer = client.generate("The with statement", max_tokens=32, ignore_eos=True)
        phases = [f"outrider_target_step_time_seconds_count {phase}" for phase in ("plan", "forward", "verify")]
        leader = settled(lambda: target.ranks[0].call("metrics"), "outrider_target_steps_total", *phases)
        other = settled(lambda: target.ranks[1].call("metrics"), "outrider_target_steps_total", *phases)
        tell_draft = partial(draft.host.call, "metrics")
        settled(tell_draft, "outrider_draft_steps_total", "outrider_draft_step_time_seconds_count")
        told = settled(tell_draft, "outrider_draft_proposals_total", "outrider_draft_proposal_time_seconds_count")
    for text, since in zip((leader, other), before, strict=True):
        assert names(text) == {metric.name for metric in RANK}
        promtool_check(text)
        now = values(text)
        steps = now["outrider_target_steps_total"] - since["outrider_target_steps_total"]
        # The other rank may have its last step still before it.
        assert steps >= answer.speculation.target_calls - 1 > 0
        assert now["outrider_target_rows_total"] - since["outrider_target_rows_total"] >= 24
        assert now["outrider_target_kv_cache_bytes"] > 0
        assert now["outrider_target_failed"] == 0
        assert now["process_resident_memory_bytes"] > 1e6
    assert names(told) == {metric.name for metric in DRAFT}
    promtool_check(told)
    now = values(told)
    proposed = "outrider_draft_proposed_tokens_total"
    assert now[proposed] - drafted[proposed] >= answer.speculation.num_draft_tokens > 0
    count = "outrider_draft_proposals_total"
    assert now[count] - drafted[count] >= answer.speculation.num_spec_steps
    assert now["outrider_draft_steps_total"] > 0
    assert 0 <= now["outrider_draft_kv_cache_usage_perc"] <= 1

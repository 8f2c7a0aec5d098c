"""What ``outrider status`` tells people."""

from __future__ import annotations

from typing import Any

from outrider.cluster.describe import describe, merge_status

GROUP: dict[str, Any] = {
    "group_id": "g",
    "epoch": 1,
    "state": "ready",
    "model": "m",
    "dtype": "float32",
    "steps": 7,
    "kv_blocks_total": 10,
    "kv_blocks_free": 4,
    "ranks": [],
    "prefix_cache_hit_tokens": 0,
    "prefix_cache_queried_tokens": 0,
    "lookup_accepted_tokens": 0,
    "lookup_draft_tokens": 0,
    "preemptions": 0,
}


def lines(**changes: Any) -> list[str]:
    """What is said of a group."""
    router = {
        "cluster": "c",
        "router_id": "r",
        "uptime_s": 1.0,
        "running": 0,
        "queued": 0,
        "settings": {"num_speculative_tokens": 4, "verifier": "coupled"},
        "groups": [{**GROUP, **changes}],
        "drafts": [],
    }
    return describe(merge_status(None, "h:1", router)).splitlines()[4:]


def test_nothing_is_said_of_what_did_not_happen() -> None:
    assert lines() == []
    nothing = {"p50": 0.0, "p99": 0.0}
    overhead = {"num_steps": 0, "overhead_ms": nothing, "plan_ms": nothing, "verify_ms": nothing}
    assert lines(step_overhead=overhead) == []


def test_costs_and_savings_are_shown() -> None:
    overhead = {
        "num_steps": 512,
        "overhead_ms": {"p50": 1.25, "p99": 3.0},
        "plan_ms": {"p50": 0.5, "p99": 0.75},
        "verify_ms": {"p50": 0.25, "p99": 1.0},
    }
    counts = {"prefix_cache_hit_tokens": 96, "prefix_cache_queried_tokens": 128, "preemptions": 2}
    assert lines(step_overhead=overhead, **counts) == [
        "  last 512 steps: beside the model's pass 1.25 ms (p99 3.00), "
        "plan 0.50 ms (p99 0.75), verify 0.25 ms (p99 1.00)",
        "  prefix cache: 96 of 128 tokens found; 2 preemptions",
    ]
    assert lines(lookup_accepted_tokens=3, lookup_draft_tokens=4) == ["  lookup: 3 of 4 tokens accepted"]


def test_speculation_that_gave_way_is_told_with_its_reason() -> None:
    at_rest = {"level": "full", "paused_for_load": False, "num_streams": 1}
    known = {"plain_goodput": 7.5, "half_goodput": 0.0, "full_goodput": 5.25}
    assert lines(speculation={**at_rest, **known}) == []
    assert lines(speculation={"level": "plain", "paused_for_load": True, "num_streams": 8, **known}) == [
        "  speculation at 8 streams: paused; tokens/s of each: 7.50 without, 5.25 with all"
    ]
    assert lines(speculation={**at_rest, "level": "half", **known, "half_goodput": 8.0}) == [
        "  speculation at 1 streams: half of the tokens; tokens/s of each: "
        "7.50 without, 8.00 with half of the tokens, 5.25 with all"
    ]

"""Drafts that are late or die, under sixteen streams: they cost speed, never a token, and never the others' speed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from outrider.client import Completion
from outrider_testbed import Case, Cluster, Relay, Testbed, run_all, run_in_turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FEWEST_SERVED = 6  # streams of each of two drafts, of sixteen in all
EXTRA_S = 0.25  # makes a step of sixteen streams long beside the time that a draft needs, on a busy machine too


# Seeds of requests that the target does not end before max_tokens; the even ones are greedy.
SEEDS = (0, 1, 3, 4, 5, 7, 8, 9, 10, 11, 13, 15, 16, 17, 19, 20)


def sixteen(**changes: Any) -> list[Case]:
    """Requests whose prompts differ from the first token on. They speculate whatever the load makes of it."""
    cases = [Case((40 + n, 300, 20 + n, 5), temperature=float(n % 2), seed=n, max_tokens=48) for n in SEEDS]
    return [replace(case, **{"num_speculative_tokens": 4, **changes}) for case in cases]


def nothing_is_lost(completions: Sequence[Completion], cases: Sequence[Case], plain: Sequence[Completion]) -> None:
    for case, completion, truth in zip(cases, completions, plain, strict=True):
        assert completion.token_ids == truth.token_ids, f"{case}: {completion.text!r} is not {truth.text!r}"
        assert completion.finish_reason == truth.finish_reason
        assert len(completion.token_ids) == case.max_tokens == completion.usage.completion_tokens


@pytest.fixture(scope="module")
def slow_target(testbed: Testbed) -> Iterator[Any]:
    target = testbed.target("one")
    target.leader.call("slow_down", EXTRA_S)
    yield target
    target.leader.call("slow_down", 0.0)


@pytest.fixture(scope="module")
def plain(testbed: Testbed, slow_target: Any) -> list[Completion]:
    """Every request alone and without drafts."""
    slow_target.leader.call("slow_down", 0.0)
    with testbed.cluster(slow_target) as cluster:
        completions = run_in_turn(cluster.address, sixteen(num_speculative_tokens=0))
    slow_target.leader.call("slow_down", EXTRA_S)
    nothing_is_lost(completions, sixteen(), completions)
    return completions


@dataclass(frozen=True)
class Run:
    """Sixteen streams with two drafts.

    Attributes:
        on_time: indices of the streams that the first draft served.
        delayed: those that the second one served.
        step_s: median time of a step; idle_s: median time between two steps.
        wall_s: time of the whole run.
        drafts: what the router's status says of the drafts, by id.
    """

    completions: list[Completion]
    on_time: set[int]
    delayed: set[int]
    step_s: float
    idle_s: float
    wall_s: float
    drafts: dict[str, dict[str, Any]]

    def tokens_per_step(self, streams: set[int]) -> float:
        """Tokens that a target pass committed for each of the streams, on average."""
        chosen = [self.completions[index] for index in streams]
        return sum(len(c.token_ids) for c in chosen) / sum(c.speculation.target_calls for c in chosen)


def run_with_delay(testbed: Testbed, target: Any, delay_s: float) -> Run:
    """The second draft answers ``delay_s`` late: half of that on the way there, half on the way back."""
    cases = sixteen()
    drafts = {name: testbed.draft(name) for name in ("tiny", "tiny-2")}
    with ExitStack() as stack:
        relays = {
            name: stack.enter_context(Relay(draft.record["address"], (delay_s * (name == "tiny-2") / 2,) * 2))
            for name, draft in drafts.items()
        }
        addresses = {name: relay.address for name, relay in relays.items()}
        cluster = stack.enter_context(testbed.cluster(target, addresses))
        target.leader.call("step_times")
        served: dict[str, set[int]] = {name: set() for name in drafts}
        next_look = 80

        def look(num_tokens: int) -> None:
            nonlocal next_look  # a draft far away hears of its streams late: both are looked at until they have them
            if num_tokens < next_look or all(len(streams) >= FEWEST_SERVED for streams in served.values()):
                return
            next_look = num_tokens + 16
            for name, draft in drafts.items():
                for tokens in draft.host.call("session_tokens"):
                    served[name] |= {i for i, case in enumerate(cases) if tuple(tokens[:4]) == case.prompt}

        begun = time.monotonic()
        completions = run_all(cluster.address, cases, on_token=look)
        wall_s = time.monotonic() - begun
        status = {draft["draft_id"]: draft for draft in cluster.status()["drafts"]}
    steps = [step for step in target.leader.call("step_times") if step[2] > 8]
    return Run(
        completions,
        on_time=served["tiny"],
        delayed=served["tiny-2"],
        step_s=statistics.median(end - begin for begin, end, _, _ in steps),
        idle_s=statistics.median(after[0] - before[1] for before, after in itertools.pairwise(steps)),
        wall_s=wall_s,
        drafts=status,
    )


def describe(name: str, run: Run) -> None:
    rates = {d: f"{s['num_accepted_tokens']}/{s['num_draft_tokens']}" for d, s in run.drafts.items()}
    print(
        f"{name}: step {1e3 * run.step_s:.0f} ms, between steps {1e3 * run.idle_s:.1f} ms, all {run.wall_s:.1f} s, "
        f"tokens/step on time {run.tokens_per_step(run.on_time):.2f}, late {run.tokens_per_step(run.delayed):.2f}, "
        f"accepted {rates}"
    )


@pytest.fixture(scope="module")
def undelayed(testbed: Testbed, slow_target: Any, plain: list[Completion]) -> Run:
    run = run_with_delay(testbed, slow_target, 0.0)
    nothing_is_lost(run.completions, sixteen(), plain)
    describe("no delay", run)
    return run


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_delayed_draft(
    testbed: Testbed, slow_target: Any, plain: list[Completion], undelayed: Run, steps: int
) -> None:
    run = run_with_delay(testbed, slow_target, steps * undelayed.step_s)
    describe(f"delayed by {steps} steps", run)
    nothing_is_lost(run.completions, sixteen(), plain)
    assert len(run.on_time) >= FEWEST_SERVED, "the drafts did not share the streams"
    assert len(run.delayed) >= FEWEST_SERVED
    late = run.drafts["tiny-2"]
    if steps < 5:  # whether anything still fits that began five tokens ago is chance
        assert late["num_accepted_tokens"] > 0
    assert late["proposal_ms"] > 1e3 * steps * undelayed.step_s, "the relay did not delay: nothing was proven"
    # The others: as many tokens a step as ever, and no step waited for the late draft.
    assert run.tokens_per_step(run.on_time) > 0.7 * undelayed.tokens_per_step(run.on_time)
    assert run.idle_s < undelayed.idle_s + 0.5 * run.step_s


def test_sixteen_streams_outlive_their_draft(testbed: Testbed, slow_target: Any, plain: list[Completion]) -> None:
    """Killed in the middle. ``status`` tells the story: before, and after."""
    cases = sixteen()
    rejection = [replace(case, temperature=1.0, verifier="rejection") for case in cases[:4]]
    draft = testbed.new_draft(draft_id="doomed")
    seen: dict[str, Any] = {}
    with (
        testbed.cluster(slow_target, (draft,), router={"max_num_seqs": 12}) as cluster,
        ThreadPoolExecutor(1) as other,
    ):

        def kill(num_tokens: int) -> None:
            if num_tokens > 300 and not seen:
                slow_target.leader.call("slow_down", 3.0)  # nothing ends while the status is asked for
                seen.update(other.submit(cluster.status).result(60))
                slow_target.leader.call("slow_down", EXTRA_S)
                draft.kill()

        completions = run_all(cluster.address, [*cases, *rejection], on_token=kill)

        def is_lost() -> bool:
            return bool(cluster.status()["drafts"][0]["state"].startswith("lost"))

        cluster.until(is_lost, "the draft counts as lost", 60)
        after = cluster.status()
    nothing_is_lost(completions[:16], cases, plain)
    for completion in completions[16:]:
        assert len(completion.token_ids) == 48 or completion.finish_reason == "stop"
    check_status_in_the_middle(seen, slow_target, cluster)
    assert (after["queued"], after["running"]) == (0, 0)
    assert after["groups"][0]["kv_blocks_free"] == after["groups"][0]["kv_blocks_total"]
    assert after["drafts"][0]["sessions"] == 0


def check_status_in_the_middle(status: dict[str, Any], target: Any, cluster: Cluster) -> None:
    assert status["cluster"] == cluster.name
    (group,) = status["groups"]
    assert (group["group_id"], group["state"], group["epoch"]) == ("g0", "ready", target.record["epoch"])
    assert group["leader_address"] == target.record["address"]
    assert group["dtype"] == "float32"
    assert group["row_invariant"]
    assert [(rank["rank"], rank["pid"]) for rank in group["ranks"]] == [(0, target.leader.process.pid)]
    assert group["steps"] > 0
    assert 0 < group["kv_blocks_free"] < group["kv_blocks_total"]
    assert status["running"] == 12
    assert 0 < status["queued"] <= 8
    (draft,) = status["drafts"]
    assert (draft["draft_id"], draft["state"]) == ("doomed", "ready")
    assert 0 < draft["sessions"] <= 12
    assert draft["num_accepted_tokens"] > 0

"""A router or a target rank that is killed in the middle: one clear error or the same text, and nobody hangs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.client import Client, Completion, Unavailable
from outrider_testbed import Case, Testbed, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = [Case((60 + n, 7, 300), temperature=float(n % 2), seed=n, max_tokens=48) for n in range(6)]
CLIENT_S = 120.0  # how long a client would wait; it learns of it before that


@pytest.fixture(scope="module")
def target(testbed: Testbed) -> Iterator[Any]:
    target = testbed.target("one")
    target.leader.call("slow_down", 0.02)
    yield target
    target.leader.call("slow_down", 0.0)


@pytest.fixture(scope="module")
def plain(testbed: Testbed, target: Any) -> list[Completion]:
    with testbed.cluster(target) as cluster:
        return run_all(cluster.address, [case.with_k(0) for case in CASES])


def texts(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def test_killed_router(testbed: Testbed, target: Any, plain: list[Completion]) -> None:
    """Its clients get UNAVAILABLE at once; the next router takes the group over, and requests can be sent again."""
    with testbed.cluster(target, (testbed.draft("tiny"),)) as cluster:

        def stream(case: Case) -> tuple[int, str]:
            """Tokens that came, and the error."""
            came = 0
            try:
                with (
                    Client(cluster.address, timeout=CLIENT_S) as client,
                    client.stream(list(case.prompt), **{**case.options(), "max_tokens": 400}) as pieces,
                ):
                    for delta in pieces.events():
                        came += len(delta.token_ids)
                        counts[case.seed] = came
            except Unavailable as error:
                return came, str(error)
            pytest.fail("the stream ended as if nothing had happened")

        counts: dict[int, int] = {}
        with ThreadPoolExecutor(len(CASES)) as pool:
            streams = [pool.submit(stream, case) for case in CASES]
            cluster.until(lambda: len(counts) == len(CASES) and min(counts.values()) > 8, "all streams run", 60)
            cluster.kill_router()
            results = [future.result(timeout=60) for future in streams]
        for came, error in results:
            assert came > 8
            assert cluster.address in error
            assert "\n" not in error
        cluster.start_router()
        cluster.until(lambda: cluster.num_ready_drafts() == 1, "the draft joins the next router", 60)
        assert texts(run_all(cluster.address, CASES)) == texts(plain)
        status = cluster.status()
        assert (status["running"], status["queued"]) == (0, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank(testbed: Testbed, target: Any, plain: list[Completion], rank: int) -> None:
    """A group of two is killed and one of one takes over: the texts go on as if nothing had happened."""
    doomed = testbed.new_target(2)
    killed: list[int] = []
    try:
        with testbed.cluster(doomed, (testbed.draft("tiny"),)) as cluster, ThreadPoolExecutor(1) as other:

            def rebuild() -> None:
                cluster.until(lambda: "lost" in cluster.status()["groups"][0]["state"], "the group is lost", 60)
                cluster.withdraw("g0")
                cluster.announce("target", "g0", target.next_record(after=doomed.record["epoch"]))

            def kill(num_tokens: int) -> None:
                if num_tokens > 100 and not killed:
                    killed.append(num_tokens)
                    doomed.ranks[rank].kill()
                    rebuilt.append(other.submit(rebuild))

            rebuilt: list[Any] = []
            completions = run_all(cluster.address, CASES, on_token=kill)
            rebuilt[0].result(60)
            status = cluster.status()
    finally:
        doomed.kill()  # the other rank waits for the dead one in a sum, as busily as it can
    assert killed
    assert texts(completions) == texts(plain)
    assert all(
        len(completion.token_ids) == case.max_tokens for case, completion in zip(CASES, completions, strict=True)
    )
    assert target.record["epoch"] > doomed.record["epoch"]
    assert [(group["epoch"], group["state"]) for group in status["groups"]] == [(target.record["epoch"], "ready")]
    assert (status["running"], status["queued"]) == (0, 0)
    assert status["groups"][0]["kv_blocks_free"] == status["groups"][0]["kv_blocks_total"]

"""Profiles over the protocol: numbers for every point, behind every request, and nothing left in the cache."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc
import pytest

from outrider.client import AsyncClient, Conflict, DeadlineExceeded, InvalidRequest, OutriderError, Unavailable
from outrider.cluster.commands.profile import as_facts, as_table
from outrider.core.errors_wire import error_from_rpc
from outrider.v1 import admin_pb2, admin_pb2_grpc


async def profile(address: str, *, timeout: float = 20.0, **request: Any) -> tuple[list[Any], admin_pb2.ProfileResult]:
    """The progress that was told, and the result."""
    progress, result = [], admin_pb2.ProfileResult()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            async for response in stub.Profile(admin_pb2.ProfileRequest(**request), timeout=timeout):
                if response.HasField("progress"):
                    progress.append((response.progress.done, response.progress.total))
                else:
                    result = response.result
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
    return progress, result


async def test_every_point_has_its_numbers(stand_ins: Any) -> None:
    progress, result = await profile(
        stand_ins.address, rows=[1, 5, 9], contexts=[16, 200], num_sequences=[1, 3], num_runs=3, num_proposals=6
    )
    points = {(cost.num_sequences, cost.context, cost.rows): cost for cost in result.passes}
    assert set(points) == {(count, context, rows) for count in (1, 3) for context in (16, 200) for rows in (1, 5, 9)}
    for cost in points.values():
        assert cost.num_runs == 3
        assert 0 < cost.overhead_ms.min <= cost.overhead_ms.p50 <= cost.overhead_ms.max
        assert 0 <= cost.forward_ms.min <= cost.forward_ms.p50 <= cost.forward_ms.max
    assert [draft.draft_id for draft in result.drafts] == ["draft-0"]
    assert result.drafts[0].num_proposals == 6
    assert result.left_out == []
    assert progress[-1] == (3 * 12 + 6, 3 * 12 + 6)
    assert progress == sorted(progress)
    assert result.group_id == "group-0"
    stand_ins.check()


async def test_defaults_are_what_the_group_has_room_for(stand_ins: Any) -> None:
    _, result = await profile(stand_ins.address, num_runs=1, num_proposals=0)
    assert {cost.context for cost in result.passes} == {128, 512}  # of 1024 positions and 256 blocks of 4
    assert {cost.rows for cost in result.passes} >= {1, 2, 5, 9, 16, 32}
    assert not result.drafts
    stand_ins.check()


@pytest.fixture
def soon_over(monkeypatch: pytest.MonkeyPatch) -> float:
    """A client's timeout in seconds, of which the router leaves half a second to a profile: the client hears why."""
    monkeypatch.setattr("outrider.router.admin.REPLY_S", 59.5)
    return 60.0


async def test_what_does_not_fit_is_named(stand_ins: Any) -> None:
    _, result = await profile(
        stand_ins.address, rows=[1, 99], contexts=[8, 5000], num_sequences=[1, 90], num_runs=1, num_proposals=0
    )
    assert [(cost.context, cost.rows) for cost in result.passes] == [(8, 1)]
    assert len(result.left_out) == 3
    assert any("99 rows" in line for line in result.left_out)
    assert any("5000 positions" in line for line in result.left_out)
    assert any("90 sequences" in line for line in result.left_out)


async def test_requests_go_first_and_find_the_cache_free(stand_ins: Any) -> None:
    stand_ins.target.step_s = 0.005
    # The profile holds nearly the whole cache, and so would the request.
    running = asyncio.create_task(
        profile(stand_ins.address, rows=[1, 5], contexts=[900], num_runs=20, num_proposals=0, timeout=60)
    )
    scheduler = stand_ins.server.group.scheduler
    async with asyncio.timeout(60):
        while scheduler.pool.num_free > 100:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        stand_ins.target.pause()
        async with AsyncClient(stand_ins.address, timeout=60) as client:
            asked = client.generate("a" * 600, max_tokens=40, temperature=0, num_speculative_tokens=0)
            answering = asyncio.create_task(asked)
            while not stand_ins.server.group.num_unfinished:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            stand_ins.target.resume()
            answer = await answering
            assert not running.done()
            assert answer.usage.completion_tokens == 40
    _, result = await running
    assert [cost.num_runs for cost in result.passes] == [20, 20]
    stand_ins.check()


async def test_a_busy_group_lets_it_run_out_of_time(stand_ins: Any, soon_over: float) -> None:
    stand_ins.target.step_s = 0.01
    async with AsyncClient(stand_ins.address, timeout=30.0) as client:
        stream = client.stream("abc", max_tokens=900, temperature=0, num_speculative_tokens=0, ignore_eos=True)
        async with stream:
            events = stream.events()
            await anext(events)
            with pytest.raises(DeadlineExceeded, match="0 of 10 measurements were made"):
                await profile(
                    stand_ins.address, timeout=soon_over, rows=[1], contexts=[8], num_runs=10, num_proposals=0
                )


async def test_one_at_a_time_and_a_client_that_leaves(stand_ins: Any) -> None:
    stand_ins.target.step_s = 0.01
    first = asyncio.create_task(profile(stand_ins.address, rows=[1], contexts=[8], num_runs=900, timeout=60))
    async with asyncio.timeout(60):
        while not stand_ins.target.num_steps:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    with pytest.raises(Conflict, match="runs already"):
        await profile(stand_ins.address, rows=[1], contexts=[8])
    first.cancel()
    async with asyncio.timeout(60):
        while True:
            try:
                await profile(stand_ins.address, rows=[1], contexts=[8], num_runs=1, num_proposals=0)
                break
            except Conflict:
                await asyncio.sleep(0.01)
    stand_ins.check()


async def test_a_target_that_dies_ends_it(stand_ins: Any) -> None:
    stand_ins.target.step_s = 0.01
    running = asyncio.create_task(profile(stand_ins.address, rows=[1], contexts=[8], num_runs=900, timeout=60))
    async with asyncio.timeout(60):
        while not stand_ins.target.num_steps:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await stand_ins.target.stop()
    with pytest.raises(Unavailable):
        await running
    await stand_ins.target.start()
    async with asyncio.timeout(60):
        while not stand_ins.server.group.is_attached:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    _, result = await profile(stand_ins.address, rows=[1, 2], contexts=[8], num_runs=2, num_proposals=0)
    assert len(result.passes) == 2
    stand_ins.check()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"rows": [0]}, "rows"),
        ({"contexts": [0]}, "contexts"),
        ({"num_sequences": [1] * 65}, "num_sequences"),
        ({"num_runs": 1001}, "num_runs"),
        ({"num_proposals": 1001}, "num_proposals"),
    ],
)
async def test_what_cannot_be_measured_is_refused(stand_ins: Any, request_: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await profile(stand_ins.address, **request_)
    assert refused.value.field == field
    assert isinstance(refused.value, OutriderError)


async def run_command(*words: str) -> tuple[int, str, str]:
    """The command line in a process of its own: status, output, errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "outrider.cluster.cli",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


async def test_the_command_prints_what_tuning_reads(stand_ins: Any) -> None:
    words = ("profile", "--address", stand_ins.address, "--rows", "1,5", "--contexts", "16,64,9999", "--runs", "2")
    status, output, errors = await run_command(*words, "--proposals", "5", "--json")
    assert status == 0, errors
    assert "left out: 1 x 9999 positions" in errors
    facts = json.loads(output)
    assert set(facts["target_ms"]) == {"1", "5"}
    assert set(facts["target_ms_by_context"]) == {"16", "64"}
    assert facts["draft_ms"] == 0.0  # a stand-in tells no time
    assert facts["overhead_ms"] > 0
    assert facts["overhead_ms"] == facts["overhead_ms_by_context"]["16"]
    assert [draft["num_proposals"] for draft in facts["drafts"]] == [5]


async def test_the_command_refuses_what_is_no_number(stand_ins: Any) -> None:
    status, output, errors = await run_command("profile", "--address", stand_ins.address, "--rows", "1;5")
    assert (status, output) == (2, "")
    assert "--rows" in errors


def test_the_table_shows_each_context() -> None:
    spread = admin_pb2.Spread(p50=2.0, min=1.0, max=3.0)
    result = admin_pb2.ProfileResult(
        model="m",
        dtype="float32",
        tensor_parallel_size=1,
        passes=[
            admin_pb2.PassCost(
                context=context, num_sequences=1, rows=rows, num_runs=1, forward_ms=spread, overhead_ms=spread
            )
            for context in (128, 512)
            for rows in (1, 5)
        ],
        drafts=[admin_pb2.DraftCost(draft_id="d", num_proposals=3, ms_per_token=spread, ms_per_proposal=spread)],
    )
    table = as_table(as_facts(result))
    for part in ("128", "512", "5 rows", "(1.00)", "draft d"):
        assert part in table


async def test_a_target_that_is_away_is_what_the_deadline_tells_of(stand_ins: Any, soon_over: float) -> None:
    await stand_ins.target.stop()
    async with asyncio.timeout(60):
        while stand_ins.server.group.is_attached:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded, match="the target group is lost"):
        await profile(stand_ins.address, timeout=soon_over, rows=[1], contexts=[8])


async def test_a_client_that_leaves_takes_the_drafts_request_along(stand_ins: Any) -> None:
    stand_ins.target.step_s = 0.02
    running = asyncio.create_task(
        profile(stand_ins.address, rows=[1], contexts=[8], num_runs=1, num_proposals=900, timeout=60)
    )
    async with asyncio.timeout(60):
        while not stand_ins.draft.num_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    async with asyncio.timeout(60):
        while not stand_ins.server.group.scheduler.is_idle:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    stand_ins.check()

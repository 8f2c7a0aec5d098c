"""With steps planned ahead: the same texts, whatever dies, and the group is asked before it is done."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from outrider.client import AsyncClient, GenerationFailed
from outrider.router import planning
from outrider.router.server import RouterServer
from outrider.testing import ToyModel

PROMPTS = ["Once upon", "a time", "there was"]
AHEAD = {"plan_ahead": True, "port": 0}


@pytest.fixture(autouse=True)
def _as_early_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long steps take on this machine."""
    monkeypatch.setattr(planning, "LEAD_S", 1e6)


def expected(prompt: str, count: int) -> list[int]:
    return ToyModel().output(list(prompt.encode()), count)


async def tokens_of(client: Any, count: int = 60, **options: Any) -> list[list[int]]:
    options = {"temperature": 0, "max_tokens": count, "ignore_eos": True, **options}
    answers = await asyncio.gather(*(client.generate(prompt, **options) for prompt in PROMPTS))
    return [list(answer.token_ids) for answer in answers]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}])
async def test_the_text_is_the_same_with_and_without(world: Any, options: dict[str, Any]) -> None:
    target = await world.target()
    async with RouterServer(world.config(), world.redis_url, router_id="router-0", settings=world.times) as plain:
        await world.until(lambda: plain.group.is_attached, "the router attaches")
        async with AsyncClient(plain.address, timeout=60) as client:
            without = await tokens_of(client, **options)
    assert target.num_planned_ahead == 0
    server = await world.router(router_id="router-1", router=AHEAD)
    assert await tokens_of(await world.client(server), **options) == without
    assert target.num_planned_ahead > 20
    assert target.faults == []
    assert server.group.overhead.snapshot().num_steps == server.group.scheduler.snapshot().num_steps
    server.group.scheduler.check_integrity()


async def test_stop_strings_end_texts_with_a_step_in_flight(world: Any) -> None:
    target = await world.target()
    server = await world.router(router=AHEAD)
    client = await world.client(server)
    whole = (await client.generate(PROMPTS[0], max_tokens=60, temperature=0, ignore_eos=True)).text
    stop = whole[20:24]
    for _ in range(5):
        answer = await client.generate(PROMPTS[0], max_tokens=60, temperature=0, ignore_eos=True, stop=[stop])
        assert answer.text == whole[: whole.index(stop)]
    assert target.num_planned_ahead > 0
    await world.until(lambda: server.group.scheduler.is_idle, "the last step is over")
    snapshot = server.group.scheduler.snapshot()
    assert snapshot.num_free_blocks == snapshot.num_blocks
    server.group.scheduler.check_integrity()
    assert target.faults == []


async def test_a_stream_that_breaks_and_a_group_that_fails(world: Any) -> None:
    target = await world.target(step_s=0.005)
    server = await world.router(router=AHEAD)
    client = await world.client(server)
    task = asyncio.create_task(tokens_of(client, 150))
    await world.until(lambda: target.num_planned_ahead > 5, "steps are planned ahead")
    server.group.target.stream.end("cut by the test")
    await world.until(lambda: target.num_attached == 2, "it is attached again")
    seen = target.num_planned_ahead
    await world.until(lambda: target.num_planned_ahead > seen + 5, "steps are planned ahead again")
    target.fail("rank 1 is lost")
    await world.until(lambda: not server.group.is_attached, "the failure is seen")
    rebuilt = await world.target(epoch=2)
    assert await task == [expected(prompt, 150) for prompt in PROMPTS]
    assert rebuilt.num_planned_ahead > 0
    assert target.faults == rebuilt.faults == []
    server.group.scheduler.check_integrity()


async def test_a_target_that_hangs_with_two_steps(world: Any) -> None:
    target = await world.target(step_s=0.005)
    server = await world.router(times=replace(world.times, step_timeout_s=2.0), router=AHEAD)
    client = await world.client(server)
    task = asyncio.create_task(tokens_of(client, 60))
    await world.until(lambda: target.num_planned_ahead > 5, "steps are planned ahead")
    seen = target.num_attached
    target.pause()
    await world.until(lambda: target.num_attached > seen, "the router attaches again")
    target.resume()
    assert await task == [expected(prompt, 60) for prompt in PROMPTS]
    server.group.scheduler.check_integrity()


async def test_aborts_and_errors_leave_nothing_behind(world: Any) -> None:
    bad = "bad prompt"
    target = await world.target(step_s=0.002, nan_prompts=(tuple(bad.encode()),))
    server = await world.router(router=AHEAD)
    client = await world.client(server)
    task = asyncio.create_task(tokens_of(client, 200))
    await world.until(lambda: target.num_planned_ahead > 5, "steps are planned ahead")
    book = server.group.scheduler._requests
    for number in range(5):
        with pytest.raises(GenerationFailed, match="not finite"):
            await client.generate(bad, temperature=0)
        name = f"gone-{number}"
        gone = asyncio.create_task(client.generate(name, max_tokens=300, temperature=0, request_id=name))
        await world.until(lambda name=name, gone=gone: book.find(name, 0) is not None or gone.done(), "it is there")
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    assert await task == [expected(prompt, 200) for prompt in PROMPTS]
    await world.until(lambda: server.group.scheduler.is_idle, "all is over")
    snapshot = server.group.scheduler.snapshot()
    assert snapshot.num_free_blocks == snapshot.num_blocks
    server.group.scheduler.check_integrity()
    assert target.faults == []

"""Targets and drafts that die, come back, are slow or do not fit; clients that go away."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import grpc
import pytest

from outrider.client import AsyncClient, Conflict, DeadlineExceeded, GenerationFailed, Unavailable
from outrider.testing import StandInDraft, StandInTarget, ToyModel
from outrider.testing.toy import toy_fingerprint, write_toy_model

PROMPT = "Once upon"


def expected(count: int, prompt: str = PROMPT) -> list[int]:
    return ToyModel().output(list(prompt.encode()), count)


async def start(world: Any, client: AsyncClient, target: StandInTarget, **options: Any) -> asyncio.Task[Any]:
    """A request that runs and has committed something."""
    before = target.num_steps
    task = asyncio.create_task(client.generate(PROMPT, temperature=0, **options))
    await world.until(lambda: target.num_steps > before + 2 or task.done(), "the request runs")
    return task


# Clients that go away.


async def test_cancelled_in_the_middle_and_the_same_id_at_once(world: Any) -> None:
    """V1: the result of the old round does not land in the new request."""
    target = await world.target(step_s=0.02)
    server = await world.router()
    client = await world.client(server)
    for _ in range(3):
        task = await start(world, client, target, max_tokens=200, request_id="mine")
        target.pause()  # the cancellation and the new request both fall into one step
        task.cancel()
        await world.until(lambda: server.group.num_unfinished == 0, "the cancellation arrives")
        other = asyncio.create_task(client.generate("another", max_tokens=12, temperature=0, request_id="mine"))
        await world.until(lambda: server.group.num_unfinished == 1, "the new request arrives")
        target.resume()
        assert list((await other).token_ids) == expected(12, "another")
    assert target.faults == []
    server.group.scheduler.check_integrity()
    assert server.group.scheduler.snapshot().num_running == 0


async def test_abort_by_id(world: Any) -> None:
    target = await world.target(step_s=0.01)
    client = await world.client(await world.router())
    task = await start(world, client, target, max_tokens=400, request_id="long")
    target.pause()
    assert await client.abort("long")
    completion = await task
    assert completion.finish_reason == "abort"
    assert list(completion.token_ids) == expected(len(completion.token_ids))
    assert not await client.abort("long")


async def test_an_id_in_use_is_refused(world: Any) -> None:
    target = await world.target(step_s=0.01)
    client = await world.client(await world.router())
    task = await start(world, client, target, max_tokens=60, request_id="same")
    target.pause()
    with pytest.raises(Conflict, match="request same runs already"):
        await client.generate(PROMPT, request_id="same")
    target.resume()
    assert list((await task).token_ids) == expected(60)


async def test_a_deadline_ends_the_request_everywhere(world: Any) -> None:
    await world.target(step_s=0.05)
    server = await world.router()
    client = await world.client(server)
    with pytest.raises(DeadlineExceeded):
        await client.generate(PROMPT, temperature=0, max_tokens=400, timeout=0.4)
    await world.until(lambda: server.group.num_unfinished == 0, "the request ends in the scheduler")
    await world.until(lambda: server.group.scheduler.snapshot().num_running == 0, "its blocks are free")


async def test_the_servers_own_deadline(world: Any) -> None:
    """A client without a deadline gets the router's, and a clear line."""
    await world.target(step_s=0.05)
    server = await world.router(router={"default_timeout_s": 0.3})
    client = await world.client(server)
    from outrider.client._request import build_request

    call = client._generation.Generate(build_request(PROMPT, temperature=0.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "ran out of time after" in caught.value.details()


# Drafts.


async def test_a_slow_draft_holds_nobody_up(world: Any) -> None:
    target = await world.target(step_s=0.005)
    await world.draft(delay_s=3600.0)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    completion = await client.generate(PROMPT, max_tokens=60, temperature=0)
    assert list(completion.token_ids) == expected(60)
    assert target.faults == []


async def test_a_draft_that_is_a_little_late_still_helps(world: Any) -> None:
    target = await world.target(step_s=0.01)
    world.keep_in_step(target, await world.draft(delay_s=0.02), behind=2)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    completion = await client.generate(PROMPT, max_tokens=120, temperature=0, num_speculative_tokens=4)
    assert list(completion.token_ids) == expected(120)
    assert completion.speculation.num_accepted_tokens > 0


async def test_a_draft_that_dies_costs_no_text(world: Any) -> None:
    target = await world.target(step_s=0.01)
    draft = await world.draft()
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    tasks = [await start(world, client, target, max_tokens=200, num_speculative_tokens=4) for _ in range(4)]
    await world.until(lambda: bool(target.proposals), "something was proposed")
    await draft.stop()
    for task in tasks:
        assert list((await task).token_ids) == expected(200)
    state = (await client.status())["drafts"][0]["state"]
    assert state.startswith("lost: "), state
    await world.withdraw("draft", "draft-0")
    await world.until(lambda: not server.group.drafts.drafts, "the draft is forgotten")
    assert list((await client.generate(PROMPT, max_tokens=20, temperature=0)).token_ids) == expected(20)


async def test_a_draft_that_comes_back_is_used_for_open_requests(world: Any) -> None:
    target = await world.target(step_s=0.05)  # until the draft is there again
    draft = await world.draft()
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    task = await start(world, client, target, max_tokens=400)
    await draft.stop()
    await world.until(lambda: not any(d.state == "ready" for d in server.group.drafts.drafts.values()), "it is lost")
    opened = draft.num_opened
    await draft.start()
    await world.until(lambda: draft.num_opened > opened, "the open request gets a session again")
    target.step_s = 0.001
    assert list((await task).token_ids) == expected(400)
    assert draft.faults == []


async def test_a_draft_that_joins_late_is_used_for_open_requests(world: Any) -> None:
    target = await world.target(step_s=0.05)  # until the draft is there
    server = await world.router()
    client = await world.client(server)
    task = await start(world, client, target, max_tokens=300, num_speculative_tokens=4)
    assert target.proposals == []
    draft = await world.draft()
    await world.until(lambda: any(accepted for _, accepted in target.proposals) or task.done(), "the draft is used")
    target.step_s = 0.001
    completion = await task
    assert list(completion.token_ids) == expected(300)
    assert completion.speculation.num_accepted_tokens > 0
    assert draft.faults == []


async def test_a_draft_that_evicts_costs_no_text(world: Any) -> None:
    await world.target(step_s=0.002)
    draft = await world.draft(evict=True)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    completion = await client.generate(PROMPT, max_tokens=40, temperature=0)
    assert list(completion.token_ids) == expected(40)
    assert draft.num_opened > 0, "unknown: no session was opened"


async def test_a_draft_with_a_smaller_context(world: Any) -> None:
    """E6: speculation stops for that request, the text goes on."""
    await world.target(step_s=0.003)
    await world.draft(max_model_len=40)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    completion = await client.generate(PROMPT, max_tokens=100, temperature=0)
    assert list(completion.token_ids) == expected(100)


async def test_a_draft_with_another_tokenizer_is_refused(
    world: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """M1: refused with both fingerprints, in the log and in the status; the text goes on without it."""
    other = toy_fingerprint(write_toy_model(tmp_path, rename="2"))
    await world.target()
    with caplog.at_level(logging.ERROR):
        draft = await world.draft(fingerprint=other)
        server = await world.router()
        client = await world.client(server)

        async def refused() -> bool:
            drafts = (await client.status())["drafts"]
            return bool(drafts) and drafts[0]["state"].startswith("refused: ")

        await world.until(refused, "the draft is refused")
    state = (await client.status())["drafts"][0]["state"]
    assert other in state
    assert world.fingerprint in state
    assert any(other in line and world.fingerprint in line for line in caplog.messages)
    completion = await client.generate(PROMPT, max_tokens=10, temperature=0)
    assert completion.speculation.num_draft_tokens == 0
    assert draft.num_opened == 0


async def test_a_draft_that_refuses_is_not_asked_again(world: Any) -> None:
    """A real worker compares the tokenizers itself and ends the stream; asking it again would not change them."""
    await world.target()
    draft = await world.draft(refuse="tokenizers differ: a and b")
    server = await world.router()
    client = await world.client(server)

    async def refused() -> bool:
        drafts = (await client.status())["drafts"]
        return bool(drafts) and drafts[0]["state"].startswith("refused: ")

    await world.until(refused, "the draft is refused")
    assert "tokenizers differ: a and b" in (await client.status())["drafts"][0]["state"]
    await asyncio.sleep(0.5)  # several of the first retries' delays
    assert draft.num_streams == 1


async def test_two_drafts_share_the_requests(world: Any) -> None:
    target = await world.target(step_s=0.01)
    drafts: list[StandInDraft] = [await world.draft(draft_id=f"draft-{index}") for index in range(2)]
    server = await world.router()
    await world.drafts_ready(server, 2)
    client = await world.client(server)
    tasks = [await start(world, client, target, max_tokens=60) for _ in range(6)]
    for task in tasks:
        assert list((await task).token_ids) == expected(60)
    assert all(draft.num_opened > 0 for draft in drafts)


# Targets.


async def test_a_target_that_restarts_with_a_new_epoch(world: Any) -> None:
    target = await world.target(step_s=0.01)
    await world.draft()
    server = await world.router()
    client = await world.client(server)
    tasks = [await start(world, client, target, max_tokens=100) for _ in range(3)]
    await target.stop()
    await world.until(lambda: not server.group.is_attached, "the router notices")
    assert not any(task.done() for task in tasks)
    rebuilt = await world.target(epoch=2)
    for task in tasks:
        assert list((await task).token_ids) == expected(100)
    assert target.faults == rebuilt.faults == []
    assert (await client.status())["groups"][0]["epoch"] == 2
    server.group.scheduler.check_integrity()


async def test_a_new_epoch_takes_over_while_the_old_one_hangs(world: Any) -> None:
    target = await world.target(step_s=0.01)
    client = await world.client(await world.router())
    task = await start(world, client, target, max_tokens=60)
    target.pause()
    rebuilt = await world.target(epoch=2)
    assert list((await task).token_ids) == expected(60)
    assert rebuilt.num_steps > 0


async def test_a_group_failure_waits_for_the_next_epoch(world: Any) -> None:
    target = await world.target(step_s=0.005)
    server = await world.router()
    client = await world.client(server)
    task = await start(world, client, target, max_tokens=100)
    target.fail("rank 1 holds other lengths than rank 0")
    await world.until(lambda: "rank 1 holds other lengths" in server.group.target.state, "the failure is seen")
    await asyncio.sleep(0.3)
    assert target.num_attached == 1, "a failed group was attached again"
    await world.target(epoch=2)
    assert list((await task).token_ids) == expected(100)


async def test_a_stream_that_breaks_is_attached_again(world: Any) -> None:
    target = await world.target(step_s=0.01)
    server = await world.router()
    client = await world.client(server)
    task = await start(world, client, target, max_tokens=80)
    server.group.target.stream.end("cut by the test")
    assert list((await task).token_ids) == expected(80)
    assert target.num_attached == 2
    assert target.faults == []


async def test_an_idle_router_notices_that_its_target_died(world: Any) -> None:
    target = await world.target()
    server = await world.router()
    await target.stop()
    await world.until(lambda: not server.group.is_attached, "the router notices without a step")


async def test_requests_fail_in_one_line_when_no_target_comes_back(world: Any) -> None:
    target = await world.target(step_s=0.01)
    server = await world.router(times=replace(world.times, grace_s=0.5))
    client = await world.client(server)
    task = await start(world, client, target, max_tokens=400)
    await target.stop()
    with pytest.raises(Unavailable, match="no target group serves this cluster") as caught:
        await task
    assert "\n" not in str(caught.value)
    with pytest.raises(Unavailable, match="no target group serves this cluster"):
        await client.generate(PROMPT)
    await world.target(epoch=2)
    await world.until(lambda: server.group.is_attached, "the router attaches again")
    assert list((await client.generate(PROMPT, max_tokens=9, temperature=0)).token_ids) == expected(9)


async def test_a_step_that_takes_too_long_ends_the_stream(world: Any) -> None:
    target = await world.target(step_s=0.01)
    client = await world.client(await world.router(times=replace(world.times, step_timeout_s=2.0)))
    task = await start(world, client, target, max_tokens=50)
    seen = target.num_attached
    target.pause()
    await world.until(lambda: target.num_attached > seen, "the router attaches again")
    target.resume()
    assert list((await task).token_ids) == expected(50)


async def test_nan_rows_of_the_target_fail_that_request_only(world: Any) -> None:
    """S8: one request fails with a clear error; the others go on."""
    bad = "bad prompt"
    target = await world.target(step_s=0.005, nan_prompts=(tuple(bad.encode()),))
    client = await world.client(await world.router())
    task = await start(world, client, target, max_tokens=60)
    with pytest.raises(GenerationFailed, match="not finite"):
        await client.generate(bad, temperature=0)
    assert list((await task).token_ids) == expected(60)


async def test_a_target_with_another_tokenizer_is_not_attached(world: Any) -> None:
    await world.target(fingerprint="f" * 64)
    server = await world.router(wait=False)
    await world.until(lambda: server.group.target.state.startswith("refused: "), "the target is refused")
    assert "f" * 64 in server.group.target.state
    assert world.fingerprint in server.group.target.state
    assert not server.group.is_attached


async def test_before_a_target_is_there(world: Any) -> None:
    server = await world.router(wait=False)
    client = await world.client(server)
    with pytest.raises(Unavailable, match="waiting for a target"):
        await client.generate(PROMPT)
    await world.target()
    await world.until(lambda: server.group.is_attached, "the router attaches")
    assert list((await client.generate(PROMPT, max_tokens=9, temperature=0)).token_ids) == expected(9)

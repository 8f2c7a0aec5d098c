"""Several choices of one request, from the client to the blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.client import GenerationFailed, InvalidRequest, Overloaded
from outrider.testing import ToyModel
from outrider.v1 import generation_pb2

PROMPT = "Once upon a time there was"  # 26 tokens, of which six blocks of four are shared


def expected(model: ToyModel, count: int, choice: int) -> list[int]:
    return model.output(list(PROMPT.encode()), count, choice)


def free_blocks(server: Any) -> int:
    return server.group.scheduler.snapshot().num_free_blocks


@pytest.fixture(params=["local", "remote"])
async def client_of(request: pytest.FixtureRequest, world: Any) -> Any:
    """Makes the client of a router: of its own frontend, or of one in (as it were) another process."""
    return world.client if request.param == "local" else world.remote_frontend


async def test_choices_share_the_prompt_and_differ(world: Any, client_of: Any) -> None:
    target = await world.target()
    server = await world.router()
    client = await client_of(server)
    completion = await client.generate(PROMPT, n=4, max_tokens=12, seed=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    for choice in completion.choices:
        assert list(choice.token_ids) == expected(target.model, 12, choice.index)
        assert choice.text == bytes(choice.token_ids).decode()
        assert (choice.finish_reason, choice.usage.completion_tokens) == ("length", 12)
    assert {sampling.seed for sampling in target.samplings} == {3}
    assert sorted(sampling.choice for sampling in target.samplings) == [0, 1, 2, 3]
    assert target.num_shared == 3 * 24
    assert free_blocks(server) == 256
    server.group.scheduler.check_integrity()
    assert target.faults == []


async def test_choices_of_one_token(world: Any, client_of: Any) -> None:
    target = await world.target()
    server = await world.router(router={"max_num_seqs": 2})
    client = await client_of(server)
    completion = await client.generate(PROMPT, n=5, max_tokens=1)
    assert [list(c.token_ids) for c in completion.choices] == [expected(target.model, 1, i) for i in range(5)]
    assert target.num_shared == 4 * 24
    assert free_blocks(server) == 256
    assert target.faults == []


async def test_with_a_draft(world: Any, client_of: Any) -> None:
    target = await world.target(step_s=0.003)
    draft = await world.draft(wrong_every=5)
    world.keep_in_step(target, draft)
    server = await world.router()
    await world.drafts_ready(server)
    client = await client_of(server)
    completion = await client.generate(PROMPT, n=3, max_tokens=40, num_speculative_tokens=4)  # whatever the load
    for choice in completion.choices:
        assert list(choice.token_ids) == expected(target.model, 40, choice.index)
        assert choice.speculation.num_accepted_tokens > 0, "unknown: nothing was accepted"
    assert (target.faults, draft.faults) == ([], [])


async def test_choices_end_one_by_one_and_the_stream_after_the_last(world: Any, client_of: Any) -> None:
    model = ToyModel()
    stop = next(letter for letter in "abcdefgh " if letter.encode()[0] in expected(model, 30, 1)[:10])
    target = await world.target(step_s=0.002)
    client = await client_of(await world.router())
    completion = await client.generate(PROMPT, n=3, max_tokens=30, stop=[stop], seed=1)
    lengths = set()
    for choice in completion.choices:
        whole = bytes(expected(target.model, 30, choice.index))
        end = whole.find(stop.encode())
        if end < 0:
            assert (choice.text, choice.finish_reason) == (whole.decode(), "length")
        else:
            assert (choice.text, choice.finish_reason, choice.matched_stop) == (whole[:end].decode(), "stop", stop)
            assert bytes(choice.token_ids) == whole[: end + 1]
        lengths.add(len(choice.token_ids))
    assert len(lengths) > 1, "unknown: all choices ended together"


@pytest.mark.parametrize("after", [1, 2, 7])
async def test_cancelling_ends_every_choice(world: Any, client_of: Any, after: int) -> None:
    target = await world.target(step_s=0.005)
    server = await world.router()
    client = await client_of(server)
    async with client.stream(PROMPT, n=4, max_tokens=300, seed=1) as stream:
        seen = 0
        async for delta in stream.events():
            seen += len(delta.token_ids)
            if seen >= after:
                break
    await world.until(lambda: server.group.num_unfinished == 0, "the request ends")
    await world.until(lambda: free_blocks(server) == 256, "its blocks are free")
    server.group.scheduler.check_integrity()
    steps = target.num_steps
    assert (await client.generate(PROMPT, max_tokens=3)).usage.completion_tokens == 3
    assert target.num_steps <= steps + 4
    assert target.faults == []


async def test_an_abort_ends_every_choice_and_the_stream_tells_each(world: Any, client_of: Any) -> None:
    target = await world.target(step_s=0.005)
    server = await world.router()
    client = await client_of(server)
    task = asyncio.create_task(client.generate(PROMPT, n=3, max_tokens=300, request_id="long"))
    await world.until(lambda: server.group.scheduler.snapshot().num_running == 3, "all choices run")
    target.pause()
    assert await client.abort("long")
    completion = await task
    assert [choice.finish_reason for choice in completion.choices] == ["abort"] * 3
    assert not await client.abort("long")
    target.resume()
    await world.until(lambda: free_blocks(server) == 256, "the blocks are free")


async def test_a_choice_that_fails_fails_the_request(world: Any, client_of: Any) -> None:
    """Its stream cannot say it of one choice only, so nobody waits for the others."""
    target = await world.target(step_s=0.002, nan_prompts=(tuple(PROMPT.encode()),))
    server = await world.router()
    client = await client_of(server)
    with pytest.raises(GenerationFailed, match="not finite"):
        await client.generate(PROMPT, n=3, max_tokens=50)
    await world.until(lambda: server.group.num_unfinished == 0, "the other choices end")
    assert target.faults == []


async def test_they_are_admitted_together_or_not_at_all(world: Any, client_of: Any) -> None:
    target = await world.target()
    server = await world.router(times=world.patient, router={"max_queue": 2, "max_num_seqs": 2})
    client = await client_of(server)
    target.pause()
    task = asyncio.create_task(client.generate(PROMPT, max_tokens=30))
    await world.until(lambda: server.group.num_unfinished == 1, "one runs")
    with pytest.raises(Overloaded):
        await client.generate(PROMPT, n=4, max_tokens=2)
    with pytest.raises(InvalidRequest, match="n is 5, but must be from 1 to 4"):
        await client.generate(PROMPT, n=5, max_tokens=2)
    assert server.group.num_unfinished == 1
    target.resume()
    assert len((await client.generate(PROMPT, n=3, max_tokens=2)).choices) == 3
    await task


async def test_choices_survive_a_lost_target(world: Any) -> None:
    target = await world.target(step_s=0.005)
    server = await world.router()
    client = await world.client(server)
    task = asyncio.create_task(client.generate(PROMPT, n=3, max_tokens=60))
    await world.until(lambda: target.num_steps > 8, "they run")
    await target.stop()
    target.epoch += 1
    await target.start()
    world.announce("target", target.group_id, target.record())
    completion = await task
    for choice in completion.choices:
        assert list(choice.token_ids) == expected(target.model, 60, choice.index)
    assert target.faults == []


async def test_every_message_says_which_choice_it_is_of(world: Any) -> None:
    """As the protocol has it, without the client's help: prompt, deltas of every choice, one finish for each."""
    await world.target()
    server = await world.router()
    client = await world.client(server)
    request = generation_pb2.GenerateRequest(text=PROMPT, n=3, max_tokens=4, echo=True)
    request.sampling.prompt_logprobs = 1
    events = [response async for response in client._generation.Generate(request, timeout=60)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:2] == ["started", "prompt"]
    assert kinds.count("prompt") == 1
    finished = [event.finished.choice for event in events if event.WhichOneof("event") == "finished"]
    assert sorted(finished) == [0, 1, 2]
    assert kinds[-1] == "finished"
    for choice in range(3):
        deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
        ids = [token for delta in deltas if delta.choice == choice for token in delta.token_ids]
        assert ids == expected(ToyModel(), 4, choice)
    assert {event.header.generation for event in events} == {1}

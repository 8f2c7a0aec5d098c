"""Requests through a router: the text is the model's, cut where it ends, whatever is proposed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.core.sampling import Sampling, Verifier
from outrider.testing import ToyModel
from outrider.testing.draft import foreign_tokens, from_the_future, nan_rows, wrong_base
from outrider.testing.toy import EOS

PROMPT = "Once upon"


def expected(model: ToyModel, count: int, prompt: str = PROMPT) -> list[int]:
    return model.output(list(prompt.encode()), count)


async def test_without_a_draft(world: Any) -> None:
    target = await world.target()
    client = await world.client(await world.router())
    completion = await client.generate(PROMPT, max_tokens=20, temperature=0)
    assert list(completion.token_ids) == expected(target.model, 20)
    assert completion.text == bytes(completion.token_ids).decode()
    assert completion.finish_reason == "length"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (9, 20)
    assert completion.speculation.verifier == "greedy"
    assert (completion.speculation.num_spec_steps, completion.speculation.target_calls) == (0, 20)
    assert completion.reproducible
    assert target.faults == []


@pytest.mark.parametrize("verifier", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("wrong_every", [0, 1, 3])
async def test_with_a_draft(world: Any, verifier: str, wrong_every: int) -> None:
    target = await world.target()
    draft = await world.draft(wrong_every=wrong_every)
    world.keep_in_step(target, draft)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    temperature = 0 if verifier == "greedy" else 1
    completion = await client.generate(  # which speculates whatever the load
        PROMPT, max_tokens=60, temperature=temperature, verifier=verifier, num_speculative_tokens=4
    )
    assert list(completion.token_ids) == expected(target.model, 60)
    assert completion.reproducible == (verifier != "rejection")
    spec = completion.speculation
    assert spec.verifier == verifier
    assert spec.num_draft_tokens > 0, "unknown: nothing was proposed"
    if wrong_every == 0:
        assert spec.num_accepted_tokens > 30
        assert spec.target_calls < 30
    if wrong_every == 1:
        assert spec.num_accepted_tokens == 0
    assert sum(spec.acceptance_histogram) == spec.num_spec_steps
    assert sum(index * count for index, count in enumerate(spec.acceptance_histogram)) == spec.num_accepted_tokens
    assert (spec.probability_bytes > 0) == (verifier == "rejection")
    assert (target.faults, draft.faults) == ([], [])


async def test_streaming_gives_pieces_that_make_the_whole(world: Any) -> None:
    target = await world.target()
    client = await world.client(await world.router())
    pieces: list[str] = []
    arrivals: list[int] = []

    async def taken(_: object) -> None:
        await world.until(lambda: len(pieces) >= target.num_steps, "the client has what was committed")

    target.before_step = taken
    async with client.stream(PROMPT, max_tokens=20, temperature=0) as stream:
        async for text in stream:
            pieces.append(text)
            arrivals.append(target.num_steps)
    assert arrivals == list(range(1, 21)), "the text did not stream"
    assert "".join(pieces) == stream.completion.text == bytes(expected(target.model, 20)).decode()


async def test_characters_of_several_tokens(world: Any) -> None:
    text = "héllo 😀 한글"
    target = await world.target(ToyModel().saying(text, len(PROMPT), end=True))
    client = await world.client(await world.router())
    pieces = []
    async with client.stream(PROMPT, max_tokens=100, temperature=0) as stream:
        async for piece in stream:
            pieces.append(piece)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.completion.finish_reason == "stop"
    assert stream.completion.token_ids[-1] == EOS
    assert stream.completion.matched_stop is None
    assert target.faults == []


async def test_a_stop_string_across_rounds_and_early_in_a_block(world: Any) -> None:
    """E2: text and ids end together, whether the match spans rounds or lies early in an accepted block."""
    model = ToyModel().saying("abcdefgh STOP and more text", len(PROMPT))
    await world.target(model, step_s=0.003)
    await world.draft(model)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    for k in (0, 1, 2, 3, 4, 8):
        completion = await client.generate(
            PROMPT, max_tokens=60, temperature=0, stop=["STOP", "never"], num_speculative_tokens=k
        )
        assert completion.text == "abcdefgh "
        assert bytes(completion.token_ids) == b"abcdefgh STOP"
        assert (completion.finish_reason, completion.matched_stop) == ("stop", "STOP")
        assert completion.usage.completion_tokens == len(completion.token_ids)


async def test_text_held_back_for_a_stop_string_comes_in_the_end(world: Any) -> None:
    await world.target(ToyModel().saying("abc STO", len(PROMPT)))
    client = await world.client(await world.router())
    completion = await client.generate(PROMPT, max_tokens=7, temperature=0, stop=["STOP"])
    assert (completion.text, completion.finish_reason, completion.matched_stop) == ("abc STO", "length", None)


async def test_eos_inside_an_accepted_block(world: Any) -> None:
    """E1: nothing behind EOS is counted or sent."""
    model = ToyModel().saying("abcdefg", len(PROMPT), end=True)
    await world.target(model, step_s=0.003)
    await world.draft(model)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    completion = await client.generate(PROMPT, max_tokens=60, temperature=0, num_speculative_tokens=8)
    assert completion.text == "abcdefg"
    assert completion.token_ids == (*b"abcdefg", EOS)
    assert completion.usage.completion_tokens == 8


async def test_stop_token_ids(world: Any) -> None:
    await world.target(ToyModel().saying("abcX more", len(PROMPT)))
    client = await world.client(await world.router())
    completion = await client.generate(PROMPT, max_tokens=60, temperature=0, stop_token_ids=[ord("X")])
    assert (completion.text, completion.token_ids) == ("abc", tuple(b"abcX"))
    assert (completion.finish_reason, completion.matched_stop) == ("stop", "X")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7])
async def test_max_tokens_with_a_block_of_four(world: Any, max_tokens: int) -> None:
    """E3: exactly the count asked for."""
    target = await world.target(step_s=0.003)
    await world.draft()
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    completion = await client.generate(PROMPT, max_tokens=max_tokens, temperature=0, num_speculative_tokens=4)
    assert list(completion.token_ids) == expected(target.model, max_tokens)
    assert completion.usage.completion_tokens == max_tokens
    assert completion.finish_reason == "length"


async def test_the_context_ends_the_text(world: Any) -> None:
    """E5: the block shrinks to what fits."""
    target = await world.target(max_model_len=64, step_s=0.003)
    await world.draft()
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    prompt = "x" * 61
    completion = await client.generate(prompt, temperature=0, num_speculative_tokens=5)
    assert list(completion.token_ids) == expected(target.model, 3, prompt)
    assert completion.finish_reason == "length"
    assert target.faults == []


@pytest.mark.parametrize("corrupt", [foreign_tokens, wrong_base, from_the_future, nan_rows])
async def test_a_draft_that_sends_garbage(world: Any, corrupt: Any) -> None:
    """S9: a proposal that is no proposal counts as absent; the text goes on as it is without one."""
    target = await world.target(step_s=0.003)
    draft = await world.draft(corrupt=corrupt)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    completion = await client.generate(PROMPT, max_tokens=40, temperature=1, verifier="rejection")
    assert list(completion.token_ids) == expected(target.model, 40)
    assert draft.num_proposed > 0, "unknown: nothing was proposed"
    assert completion.speculation.num_draft_tokens == 0
    assert target.faults == []


async def test_chat_and_token_ids(world: Any) -> None:
    target = await world.target()
    client = await world.client(await world.router())
    completion = await client.generate([{"role": "user", "content": "hi"}], max_tokens=5, temperature=0)
    assert list(completion.token_ids) == target.model.output([257, *b"hi\n"], 5)
    completion = await client.generate([1, 2, 3], max_tokens=5, temperature=0)
    assert list(completion.token_ids) == target.model.output([1, 2, 3], 5)


async def test_the_server_picks_a_seed_and_says_which(world: Any) -> None:
    await world.target()
    client = await world.client(await world.router())
    seeds = {(await client.generate(PROMPT, max_tokens=1)).seed for _ in range(3)}
    assert len(seeds) == 3
    assert (await client.generate(PROMPT, max_tokens=1, seed=2**64 - 1)).seed == 2**64 - 1


async def test_temperature_not_given_means_one(world: Any) -> None:
    """S5: ``top_k`` without a temperature samples at 1.0, by the default verifier."""
    target = await world.target()
    client = await world.client(await world.router())
    completion = await client.generate(PROMPT, max_tokens=1, top_k=50, seed=7)
    assert completion.speculation.verifier == "coupled"
    wanted = Sampling(temperature=1.0, top_k=50, top_p=1.0, seed=7, verifier=Verifier.COUPLED, prompt_len=len(PROMPT))
    assert target.samplings == [wanted]


async def test_many_streams_at_once(world: Any) -> None:
    """64 concurrent requests share steps, and each gets its own text."""
    target = await world.target(num_blocks=4096, step_s=0.002)
    draft = await world.draft(wrong_every=5)
    server = await world.router(router={"max_num_seqs": 32})
    await world.drafts_ready(server)
    client = await world.client(server)
    prompts = [f"prompt number {index} " + "x" * index for index in range(64)]
    completions = await asyncio.gather(*(client.generate(prompt, max_tokens=24, temperature=0) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.token_ids) == expected(target.model, 24, prompt)
    assert max(target.batch_sizes) > 16, "the streams did not share steps"
    assert (target.faults, draft.faults) == ([], [])
    server.group.scheduler.check_integrity()

"""Sampling settings from the client to the target and back: controls, grammars, ends of texts, log-probabilities."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from outrider.client import GenerationFailed, InvalidRequest
from outrider.core.prefix import HashedTokens
from outrider.testing import ToyModel
from outrider.testing.toy import EOS

PROMPT = "Once upon"
TOKENS = list(PROMPT.encode())


def raw_logprobs(model: ToyModel, prefix: list[int], choice: int = 0) -> list[float]:
    """Of every token behind a prefix, from the toy's logits."""
    text = HashedTokens(prefix)
    logits = model.logits(text.hashes[-1], len(text), choice)
    log_total = math.log(math.fsum(math.exp(logit) for logit in logits))
    return [logit - log_total for logit in logits]


def check_entry(entry: Any, model: ToyModel, prefix: list[int], token: int, num_top: int, choice: int = 0) -> None:
    wanted = raw_logprobs(model, prefix, choice)
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(wanted[token], abs=1e-4)
    assert entry.rank == 1 + sum(value > wanted[token] for value in wanted)
    best = sorted(range(len(wanted)), key=lambda index: (-wanted[index], index))[:num_top]
    assert [top.token_id for top in entry.top] == best
    assert [top.logprob for top in entry.top] == pytest.approx([wanted[index] for index in best], abs=1e-4)
    special = {256: "<|end|>", 257: "<|user|>"}
    for shown in (entry, *entry.top):
        spelt = bytes([shown.token_id]).decode("utf-8", "replace") if shown.token_id < 256 else None
        assert shown.token == (special[shown.token_id] if spelt is None else spelt)


@pytest.fixture(params=["local", "remote"])
async def client_of(request: pytest.FixtureRequest, world: Any) -> Any:
    """Makes the client of a router: of its own frontend, or of one in (as it were) another process."""
    return world.client if request.param == "local" else world.remote_frontend


async def ready(
    world: Any, client_of: Any, model: ToyModel | None = None, drafts: bool = True, in_step: bool = False
) -> tuple[Any, Any, Any]:
    """A target, a draft that is right, a router, and a client. ``in_step``: the draft is never late."""
    target = await world.target(model, step_s=0.003)
    draft = await world.draft(model) if drafts else None
    if in_step:
        world.keep_in_step(target, draft)
    server = await world.router()
    if drafts:
        await world.drafts_ready(server)
    return target, server, await client_of(server)


# Log-probabilities.


@pytest.mark.parametrize("k", [0, 4])
async def test_s10_every_token_has_the_targets_log_probability(world: Any, client_of: Any, k: int) -> None:
    target, _, client = await ready(world, client_of, in_step=True)
    completion = await client.generate(PROMPT, max_tokens=30, seed=1, logprobs=3, num_speculative_tokens=k)
    assert len(completion.logprobs) == len(completion.token_ids) == 30
    for index, (entry, token) in enumerate(zip(completion.logprobs, completion.token_ids, strict=True)):
        check_entry(entry, target.model, [*TOKENS, *completion.token_ids[:index]], token, 3)
    if k:
        assert completion.speculation.num_accepted_tokens > 0, "unknown: nothing was accepted"
    assert target.faults == []


async def test_without_a_wish_there_are_none(world: Any, client_of: Any) -> None:
    _, _, client = await ready(world, client_of, drafts=False)
    completion = await client.generate(PROMPT, max_tokens=3, temperature=0)
    assert (completion.logprobs, completion.prompt_logprobs, completion.prompt_text) == (None, None, None)


async def test_no_alternatives_is_not_no_log_probabilities(world: Any, client_of: Any) -> None:
    _, _, client = await ready(world, client_of, drafts=False)
    completion = await client.generate(PROMPT, max_tokens=3, temperature=0, logprobs=0, prompt_logprobs=0)
    assert [entry.top for entry in completion.logprobs] == [()] * 3
    assert [entry.top for entry in completion.prompt_logprobs] == [()] * len(TOKENS)


@pytest.mark.parametrize("end", ["eos", "stop string", "stop token", "length"])
async def test_e1_e2_e3_they_end_with_the_text(world: Any, client_of: Any, end: str) -> None:
    """Inside a block of accepted tokens."""
    model = ToyModel().saying("abcdefg STOP and more", len(TOKENS))
    if end == "eos":
        model = ToyModel().saying("abcdefg", len(TOKENS), end=True)
    _, _, client = await ready(world, client_of, model)
    options: dict[str, Any] = {
        "eos": {},
        "stop string": {"stop": ["STOP"]},
        "stop token": {"stop_token_ids": [ord("P")]},
        "length": {"max_tokens": 11},
    }[end]
    completion = await client.generate(
        PROMPT, **{"max_tokens": 60, "temperature": 0, "logprobs": 1, "num_speculative_tokens": 8, **options}
    )
    count = {"eos": 8, "stop string": 12, "stop token": 12, "length": 11}[end]
    assert completion.usage.completion_tokens == len(completion.token_ids) == len(completion.logprobs) == count
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("n", [1, 3])
async def test_the_prompts_log_probabilities(world: Any, client_of: Any, budget: int, n: int) -> None:
    target = await world.target(max_num_batched_tokens=budget)
    client = await client_of(await world.router())
    completion = await client.generate(PROMPT, max_tokens=4, n=n, seed=2, prompt_logprobs=2, logprobs=0)
    first, *others = completion.prompt_logprobs
    assert (first.token_id, first.token, first.logprob, first.top) == (TOKENS[0], "O", None, ())
    assert len(others) == len(TOKENS) - 1
    for index, entry in enumerate(others, 1):
        check_entry(entry, target.model, TOKENS[:index], TOKENS[index], 2)
    assert target.num_scored == len(TOKENS) - 1
    for choice in completion.choices:
        prefix = list(TOKENS)
        for entry, token in zip(choice.logprobs, choice.token_ids, strict=True):
            check_entry(entry, target.model, prefix, token, 0, choice.index)
            prefix.append(token)
    assert target.faults == []


async def test_a_prompt_of_one_token(world: Any, client_of: Any) -> None:
    await world.target()
    client = await client_of(await world.router())
    completion = await client.generate([65], max_tokens=2, temperature=0, prompt_logprobs=1, echo=True)
    assert [(entry.token, entry.logprob) for entry in completion.prompt_logprobs] == [("A", None)]
    assert completion.prompt_text == "A"


async def test_a_watch_from_the_middle_has_the_log_probabilities_from_there(world: Any) -> None:
    _, server, client = await ready(world, world.client)
    await client.generate(PROMPT, max_tokens=9, temperature=0, logprobs=0, prompt_logprobs=0, request_id="it")
    whole = [update async for update in server.group.watch("it", len(TOKENS))]
    rest = [update async for update in server.group.watch("it", len(TOKENS) + 4)]
    assert sum((update.logprobs for update in whole), ())[4:] == sum((update.logprobs for update in rest), ())
    assert len(whole[0].prompt_logprobs) == len(TOKENS) - 1
    assert all(update.prompt_logprobs == () for update in (*whole[1:], *rest))


# Where a text ends.


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "ab"), (5, "ab"), (6, "abSTOP cd"), (7, "abSTOP cd"), (13, "abSTOP cdSTOP ef")]
)
async def test_stop_strings_wait_for_min_tokens(world: Any, client_of: Any, k: int, min_tokens: int, text: str) -> None:
    model = ToyModel().saying("abSTOP cdSTOP efSTOP gh", len(TOKENS))
    target, _, client = await ready(world, client_of, model)
    completion = await client.generate(
        PROMPT, max_tokens=60, temperature=0, stop=["STOP"], min_tokens=min_tokens, num_speculative_tokens=k
    )
    assert (completion.text, completion.matched_stop) == (text, "STOP")
    assert bytes(completion.token_ids).decode() == text + "STOP"
    assert target.faults == []


@pytest.mark.parametrize("k", [0, 4])
async def test_e4_a_text_does_not_end_before_min_tokens_and_may_end_then(world: Any, client_of: Any, k: int) -> None:
    """The model wants to end after 3 tokens, then whenever it may."""
    model = ToyModel(script={len(TOKENS) + index: EOS for index in range(3, 9)})
    _, _, client = await ready(world, client_of, model)
    for min_tokens, count in ((0, 4), (3, 4), (4, 5), (5, 6), (6, 7)):
        completion = await client.generate(
            PROMPT, max_tokens=60, temperature=0, min_tokens=min_tokens, num_speculative_tokens=k
        )
        assert (completion.finish_reason, len(completion.token_ids)) == ("stop", count)
        assert completion.token_ids[-1] == EOS
        assert EOS not in completion.token_ids[:-1]
        assert "<" not in completion.text


async def test_ignore_eos(world: Any, client_of: Any) -> None:
    """The token is part of the output and has no text."""
    model = ToyModel().saying("abc", len(TOKENS), end=True)
    _, _, client = await ready(world, client_of, model)
    completion = await client.generate(PROMPT, max_tokens=9, temperature=0, ignore_eos=True)
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 9)
    assert completion.token_ids[3] == EOS
    assert completion.text == "abc" + bytes(completion.token_ids[4:]).decode()
    stopped = await client.generate(
        PROMPT, max_tokens=9, temperature=0, ignore_eos=True, stop_token_ids=[EOS], include_stop=True
    )
    assert (stopped.text, stopped.matched_stop, stopped.finish_reason) == ("abc<|end|>", "<|end|>", "stop")


@pytest.mark.parametrize("include_stop", [False, True])
async def test_the_stop_in_the_text(world: Any, client_of: Any, include_stop: bool) -> None:
    model = ToyModel().saying("abc STOPPED", len(TOKENS))
    _, _, client = await ready(world, client_of, model)

    async def text_of(**options: Any) -> tuple[str, str | None, bytes]:
        completion = await client.generate(PROMPT, max_tokens=60, temperature=0, include_stop=include_stop, **options)
        return completion.text, completion.matched_stop, bytes(completion.token_ids)

    assert await text_of(stop=["STOP"]) == ("abc STOP" if include_stop else "abc ", "STOP", b"abc STOP")
    assert await text_of(stop_token_ids=[ord("S")]) == ("abc S" if include_stop else "abc ", "S", b"abc S")
    # A token that ends the text completes no stop string.
    both = await text_of(stop=["ST"], stop_token_ids=[ord("T")])
    assert both == ("abc ST" if include_stop else "abc S", "T", b"abc ST")


@pytest.mark.parametrize("include_stop", [False, True])
async def test_eos_is_never_shown(world: Any, client_of: Any, include_stop: bool) -> None:
    model = ToyModel().saying("abc", len(TOKENS), end=True)
    _, _, client = await ready(world, client_of, model)
    completion = await client.generate(PROMPT, max_tokens=60, temperature=0, include_stop=include_stop)
    assert (completion.text, completion.finish_reason, completion.matched_stop) == ("abc", "stop", None)
    assert completion.token_ids == (*b"abc", EOS)


async def test_echo(world: Any, client_of: Any) -> None:
    await world.target()
    client = await client_of(await world.router())
    plain = await client.generate(PROMPT, max_tokens=5, temperature=0)
    completion = await client.generate(PROMPT, max_tokens=5, temperature=0, echo=True)
    assert (completion.prompt_text, completion.text) == (PROMPT, plain.text)
    tokens = await client.generate([*b"hi", 257], max_tokens=5, temperature=0, echo=True)
    assert tokens.prompt_text == "hi<|user|>"


# Controls and grammars.


@pytest.mark.parametrize("k", [0, 4])
async def test_controls_change_the_text_as_they_do_without_speculation(world: Any, client_of: Any, k: int) -> None:
    """S1 and S2 at the router: what is asked for reaches the target, resolved, with every sequence."""
    target, _, client = await ready(world, client_of)
    plain = await client.generate(PROMPT, max_tokens=20, temperature=0)
    common = max(set(plain.token_ids), key=plain.token_ids.count)
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "num_speculative_tokens": k}
    banned = await client.generate(PROMPT, banned_token_ids=[common], **options)
    assert common not in banned.token_ids
    biased = await client.generate(PROMPT, logit_bias={ord("Z"): 100.0}, **options)
    assert set(biased.token_ids) == {ord("Z")}
    named = await client.generate(PROMPT, controls={"allowed_token_ids": [ord("x"), ord("y")]}, **options)
    assert set(named.token_ids) <= {ord("x"), ord("y")}
    penalised = await client.generate(PROMPT, frequency_penalty=2.0, **options)
    assert penalised.token_ids != plain.token_ids
    assert target.samplings[-1].controls == (("frequency_penalty", 2.0),)
    assert target.faults == []


@pytest.mark.parametrize("k", [0, 4])
async def test_a_grammar(world: Any, client_of: Any, k: int) -> None:
    target, _, client = await ready(world, client_of)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    completion = await client.generate(
        PROMPT,
        max_tokens=40,
        temperature=0,
        json_schema={**schema, "additionalProperties": False},
        num_speculative_tokens=k,
    )
    assert isinstance(json.loads(completion.text)["ok"], bool)
    assert (completion.finish_reason, completion.token_ids[-1]) == ("stop", EOS)
    assert completion.speculation.num_forced_accepted <= completion.speculation.num_forced_tokens
    assert target.samplings[-1].grammar is not None
    assert target.faults == []


async def test_choices_with_a_grammar_share_the_prompt(world: Any, client_of: Any) -> None:
    target, _, client = await ready(world, client_of, drafts=False)
    completion = await client.generate(PROMPT, n=3, max_tokens=9, regex="[a-h]{5}")
    assert [len(choice.text) for choice in completion.choices] == [5, 5, 5]
    assert target.num_shared == 2 * 8
    assert target.faults == []


async def test_a_grammar_that_does_not_compile_is_refused(world: Any, client_of: Any) -> None:
    _, server, client = await ready(world, client_of, drafts=False)
    for kind, text in (("regex", "a("), ("json_schema", '{"type": 5}'), ("ebnf", "start: nowhere")):
        with pytest.raises(InvalidRequest) as caught:
            await client.generate(PROMPT, **{kind: text})
        assert caught.value.field == f"sampling.grammar.{kind}"
        assert "compile" in caught.value.limit
    assert server.group.num_unfinished == 0


async def test_settings_that_leave_no_token_end_the_request_with_an_error(world: Any, client_of: Any) -> None:
    _, server, client = await ready(world, client_of, drafts=False)
    with pytest.raises(GenerationFailed, match="no token"):
        await client.generate(PROMPT, allowed_token_ids=[65], banned_token_ids=[65], temperature=0)
    assert server.group.num_unfinished == 0


# Speculation by request.


async def test_speculation_by_request_and_by_default(world: Any, client_of: Any) -> None:
    """Live defaults, and what a request says for itself, whichever frontend it came through."""
    target, server, client = await ready(world, client_of, in_step=True)
    admin = await world.client(server)

    async def rounds(**options: Any) -> tuple[str, int, int]:
        spec = (await client.generate(PROMPT, max_tokens=20, seed=1, **options)).speculation
        return spec.verifier, len(spec.acceptance_histogram) - 1, spec.num_spec_steps

    assert (await rounds(temperature=0))[:2] == ("greedy", 4)
    assert await rounds(num_speculative_tokens=0) == ("coupled", 0, 0)
    verifier, k, steps = await rounds(num_speculative_tokens=2, verifier="rejection")
    assert (verifier, k) == ("rejection", 2)
    assert steps > 0, "unknown: nothing was proposed"
    assert target.sent_rows > 0
    await admin.update_settings(num_speculative_tokens=0)
    assert (await rounds())[1:] == (0, 0)
    verifier, k, steps = await rounds(num_speculative_tokens=3)
    assert k == 3
    assert steps > 0, "unknown: nothing was proposed"
    await admin.update_settings(num_speculative_tokens=1)
    assert (await rounds())[1] == 1
    assert target.faults == []


async def test_the_default_verifier_is_for_requests_that_sample_and_name_none(world: Any) -> None:
    *_, client = await ready(world, world.client)
    await client.update_settings(verifier="rejection")

    async def verifier(**options: Any) -> str:
        return (await client.generate(PROMPT, max_tokens=2, **options)).speculation.verifier

    assert await verifier() == "rejection"
    assert await verifier(verifier="coupled") == "coupled"
    assert await verifier(temperature=0) == "greedy"
    assert (await client.generate(PROMPT, max_tokens=2, n=2)).choices[1].speculation.verifier == "rejection"

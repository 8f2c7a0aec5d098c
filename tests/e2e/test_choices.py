"""Choices and log-probabilities of real processes (tiny pair, float32), compared with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from outrider.client import AsyncClient, Completion
from outrider_testbed import TINY, Cluster, Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GAP = 1e-4  # scores of two kernels differ by rounding
# Longer than what a step scores at most.
PROMPT = "The with statement is used to wrap the execution of a block with methods defined by a context manager. " * 6


@pytest.fixture(scope="module")
def prompt_tokens() -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json")).encode(PROMPT).ids
    return ids


@pytest.fixture(scope="module", params=["one", "small-chunks"])
def cluster(request: pytest.FixtureRequest, testbed: Testbed) -> Iterator[Cluster]:
    """One rank and the tiny draft, with whole prompts and in chunks of 20 rows."""
    target = testbed.target(request.param)
    with testbed.cluster(target, (testbed.draft("tiny"),)) as cluster:
        target.leader.call("slow_down", 0.02)
        yield cluster
        target.leader.call("slow_down", 0.0)


def generate(cluster: Cluster, requests: Sequence[dict[str, Any]]) -> list[Completion]:
    """All at once."""

    async def run() -> list[Completion]:
        async with AsyncClient(cluster.address, timeout=120.0) as client:
            return await asyncio.gather(*(client.generate(PROMPT, **options) for options in requests))

    return asyncio.run(run())


def test_choices_are_those_of_transformers_and_speculation_changes_none(
    testbed: Testbed, cluster: Cluster, prompt_tokens: list[int]
) -> None:
    options = {"n": 3, "seed": 11, "temperature": 0.8, "max_tokens": 32, "top_p": 0.95}
    (plain,) = generate(cluster, [{**options, "num_speculative_tokens": 0}])
    accepted = 0
    for _ in range(5):  # on a busy machine a draft may be late for a whole request
        (fast,) = generate(cluster, [{**options, "num_speculative_tokens": 4}])
        assert [choice.token_ids for choice in plain.choices] == [choice.token_ids for choice in fast.choices]
        accepted += sum(choice.speculation.num_accepted_tokens for choice in fast.choices)
        if accepted:
            break
    assert accepted > 0, "unknown: nothing was accepted"
    (alone,) = generate(cluster, [{**options, "n": 1}])
    assert alone.token_ids == plain.choices[0].token_ids
    assert len({choice.token_ids for choice in plain.choices}) == 3
    for choice in plain.choices:
        gap = testbed.oracle.gap(
            prompt_tokens, choice.token_ids, temperature=0.8, seed=11, choice=choice.index, top_p=0.95
        )
        assert gap < GAP


def test_log_probabilities_are_those_of_transformers(
    testbed: Testbed, cluster: Cluster, prompt_tokens: list[int]
) -> None:
    """Of the prompt and of every choice, whatever the chunks; two such requests at once share what a step scores."""
    assert len(prompt_tokens) > 128
    options = {"n": 2, "seed": 5, "max_tokens": 24, "logprobs": 2, "prompt_logprobs": 1}
    completions = generate(cluster, [options, {**options, "num_speculative_tokens": 0}, {"max_tokens": 8}])
    for completion in completions[:2]:
        entries = completion.prompt_logprobs
        assert entries is not None
        assert [entry.token_id for entry in entries] == prompt_tokens
        check(testbed, entries[1:], prompt_tokens, 1)
        for choice in completion.choices:
            assert choice.logprobs is not None
            assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
            check(testbed, choice.logprobs, [*prompt_tokens, *choice.token_ids], 2)
    first, second = (completion.prompt_logprobs for completion in completions[:2])
    assert first == second, "speculation or company changed them"


def check(testbed: Testbed, entries: Sequence[Any], text: list[int], num_top: int) -> None:
    """The entries of a text's last tokens."""
    rows = testbed.oracle.log_probabilities(text)
    for position, entry in enumerate(entries, len(text) - len(entries)):
        row = rows[position - 1]
        assert entry.logprob == pytest.approx(float(row[text[position]]), abs=1e-3)
        assert len(entry.top) == num_top
        assert [top.logprob for top in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)
        assert (entry.rank == 1) == (entry.token_id == entry.top[0].token_id)

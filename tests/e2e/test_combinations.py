"""Sampling controls in any combination: under greedy and coupled, speculation changes nothing that a client sees.

Real processes with the tiny pair, and a draft that is in time. hypothesis picks the settings; each request is made with
proposals and without, several of them side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outrider.client import Client, Completion
from outrider_testbed import Cluster, Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ("The with statement", "def ", "Return a copy of the list, a list, the list")
MAX_TOKENS = 24
COMPANY = 16  # requests at a time, half of them with proposals
VOCAB = 400  # token ids to choose from: the frequent ones come first

token_ids = st.integers(0, VOCAB - 1)
grammars: list[dict[str, Any]] = [
    {"regex": r"[a-z ]{4,30}\."},
    {"regex": r"(yes|no|perhaps), [0-9]{1,6}"},
    {"json_schema": {"type": "array", "items": {"enum": ["a", "bc", 17, None]}, "minItems": 2, "maxItems": 5}},
    {"ebnf": 'start: "x" ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'},
]

controls = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(1, 60),
        "top_p": st.floats(0.3, 1.0),
        "min_p": st.floats(0.0, 0.3),
        "typical_p": st.floats(0.2, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(token_ids, st.floats(-20.0, 20.0), max_size=5),
        "banned_token_ids": st.lists(token_ids, min_size=1, max_size=8),
        "bad_words": st.lists(st.sampled_from(["the", "a", "list", "is", "of a", "return"]), min_size=1, max_size=3),
        "min_tokens": st.integers(0, MAX_TOKENS),
        "stop": st.lists(st.sampled_from([".", "the ", "\n", "s a", "), "]), min_size=1, max_size=2),
        "include_stop": st.booleans(),
        "stop_token_ids": st.lists(token_ids, min_size=1, max_size=5),
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 3),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
    },
)
languages = st.one_of(st.none(), st.sampled_from(grammars))
temperatures = st.one_of(st.just(0.0), st.floats(0.3, 1.8))


@pytest.fixture(scope="module")
def cluster(testbed: Testbed) -> Iterator[Cluster]:
    """One rank, whose steps take as long as those of a larger model, so that the draft is in time."""
    target = testbed.target("one")
    with testbed.cluster(target, (testbed.draft("tiny"),)) as cluster:
        target.leader.call("slow_down", 0.05)
        yield cluster
        target.leader.call("slow_down", 0.0)


def drawn_requests() -> list[tuple[str, dict[str, Any]]]:
    """Sixty prompts with their settings, the same in each run."""
    drawn: list[tuple[str, dict[str, Any]]] = []

    @settings(
        max_examples=60,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
        database=None,
    )
    @given(
        prompt=st.sampled_from(PROMPTS),
        temperature=temperatures,
        options=controls,
        language=languages,
        seed=st.integers(0, 2**64 - 1),
    )
    def draw(
        prompt: str, temperature: float, options: dict[str, Any], language: dict[str, Any] | None, seed: int
    ) -> None:
        drawn.append((prompt, {**options, **(language or {}), "temperature": temperature, "seed": seed}))

    draw()
    return drawn


def test_speculation_changes_nothing(cluster: Cluster) -> None:
    def ask(prompt: str, request: dict[str, Any], k: int) -> Completion:
        with Client(cluster.address, timeout=120) as client:
            return client.generate(prompt, max_tokens=MAX_TOKENS, num_speculative_tokens=k, **request)

    drawn = drawn_requests()
    assert len(drawn) == 60
    proposed = accepted = cut_short = 0
    # With and without proposals at the same time: each is company for the others.
    with ThreadPoolExecutor(COMPANY) as pool:
        answers = [(pool.submit(ask, *one, 4), pool.submit(ask, *one, 0)) for one in drawn]
        for (prompt, request), pair in zip(drawn, answers, strict=True):
            fast, plain = (answer.result() for answer in pair)
            assert (fast.text, fast.token_ids, fast.finish_reason, fast.matched_stop) == (
                plain.text,
                plain.token_ids,
                plain.finish_reason,
                plain.matched_stop,
            ), (prompt, request)
            assert fast.logprobs == plain.logprobs, (prompt, request)
            assert fast.prompt_logprobs == plain.prompt_logprobs, (prompt, request)
            assert (fast.logprobs is None) == ("logprobs" not in request)
            if fast.logprobs is not None:
                assert [entry.token_id for entry in fast.logprobs] == list(fast.token_ids)
            assert fast.reproducible
            assert plain.speculation.num_draft_tokens == 0
            proposed += fast.speculation.num_draft_tokens
            accepted += fast.speculation.num_accepted_tokens
            cut_short += fast.finish_reason == "stop"
    print(f"accepted {accepted} of {proposed}, {cut_short} ended early")
    # Otherwise nothing was shown.
    assert proposed > 300
    assert 50 < accepted < proposed
    assert cut_short > 5

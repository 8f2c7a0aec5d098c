"""Greedy and coupled text depends on prompt and seed alone: not on draft, ``k``, chunks, company or a crash.

Real processes (router, target ranks, drafts) with the tiny pair in float32. Every text is compared with plain decoding
of one request at a time, and that with transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.client import Completion
from outrider_testbed import TINY, Case, Cluster, Testbed, run_all, run_in_turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Scores of two kernels differ by rounding; closer than this they may order two tokens differently.
GAP = 1e-4
# Added to each step where a draft must be in time.
SLOW_S = 0.02

LONG_PROMPT = (
    "The with statement is used to wrap the execution of a block with methods defined by a context manager. "
    "This allows common try, except, finally usage patterns to be encapsulated for convenient reuse. "
)
CASES = (
    Case("The with statement", temperature=0.0),
    Case(LONG_PROMPT, temperature=0.0, max_tokens=64),
    Case("The with statement", seed=1, max_tokens=64),
    Case("The with statement", seed=2),
    Case(LONG_PROMPT, seed=3, temperature=0.7),
    Case("def ", seed=2**63 + 11, temperature=1.3),
    Case("Return a", seed=5, temperature=0.9, top_p=0.9),
    Case(LONG_PROMPT, seed=6, top_k=40),
)


@pytest.fixture(scope="module")
def tiny_tokens() -> Any:
    """Tokens of a prompt."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def same_texts(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.token_ids == other.token_ids, f"case {index}: {one.text!r} is not {other.text!r}"
        assert (one.text, one.finish_reason, one.seed) == (other.text, other.finish_reason, other.seed)
        assert one.reproducible


def speculation(completions: Sequence[Completion]) -> tuple[int, int]:
    """Tokens that were proposed, and accepted."""
    return (
        sum(completion.speculation.num_draft_tokens for completion in completions),
        sum(completion.speculation.num_accepted_tokens for completion in completions),
    )


@pytest.fixture(scope="module")
def cluster(testbed: Testbed) -> Iterator[Cluster]:
    """One rank and the tiny draft. Its steps take as long as those of a larger model, so that drafts are in time."""
    target = testbed.target("one")
    with testbed.cluster(target, (testbed.draft("tiny"),)) as cluster:
        target.leader.call("slow_down", SLOW_S)
        yield cluster
        target.leader.call("slow_down", 0.0)


@pytest.fixture(scope="module")
def plain(testbed: Testbed, cluster: Cluster) -> list[Completion]:
    """Every case alone, without speculation, and so at full speed: there is no draft that must be in time."""
    leader = testbed.target("one").leader
    leader.call("slow_down", 0.0)
    completions = run_in_turn(cluster.address, [case.with_k(0) for case in CASES])
    leader.call("slow_down", SLOW_S)
    return completions


def test_plain_text_is_that_of_transformers(testbed: Testbed, plain: list[Completion], tiny_tokens: Any) -> None:
    """Each token is the one that transformers' logits choose, or the choice is closer than the rounding of kernels."""
    for case, completion in zip(CASES, plain, strict=True):
        assert completion.speculation.num_draft_tokens == 0
        assert len(completion.token_ids) == case.max_tokens or completion.finish_reason == "stop"
        sampling = {name: getattr(case, name) for name in ("temperature", "seed", "top_k", "top_p")}
        gap = testbed.oracle.gap(tiny_tokens(case.prompt), completion.token_ids, **sampling)
        assert gap < GAP, f"{case}: {gap}"
    texts = {completion.text for completion in plain}
    assert len(texts) == len(CASES), "two cases gave the same text: neither prompt nor seed counts"
    assert sum(len(completion.token_ids) for completion in plain) > 300


@pytest.mark.parametrize("k", [1, 4, 8])
def test_any_number_of_speculative_tokens(cluster: Cluster, plain: list[Completion], k: int) -> None:
    completions = run_all(cluster.address, [case.with_k(k) for case in CASES])
    same_texts(completions, plain)
    proposed, accepted = speculation(completions)
    assert 0 < accepted < proposed, f"{accepted} of {proposed} tokens were accepted: nothing was proven"
    longest = max(len(completion.speculation.acceptance_histogram) for completion in completions)
    assert longest == k + 1


def test_all_numbers_of_speculative_tokens_at_once(cluster: Cluster, plain: list[Completion]) -> None:
    cases = [case.with_k(k) for case in CASES for k in (0, 1, 4, 8)]
    completions = run_all(cluster.address, cases)
    same_texts(completions, [completion for completion in plain for _ in range(4)])
    assert speculation(completions)[1] > 0


def test_alone_with_a_draft(cluster: Cluster, plain: list[Completion]) -> None:
    completions = run_in_turn(cluster.address, [case.with_k(4) for case in CASES[:4]])
    same_texts(completions, plain[:4])
    assert speculation(completions)[1] > 0


def test_among_fifteen_others(cluster: Cluster, testbed: Testbed, plain: list[Completion]) -> None:
    """The others have other prompts, lengths, settings and verifiers."""
    leader = testbed.target("one").leader
    others = [
        Case(f"{'word ' * (3 * n)}{n}", temperature=0.3 * (n % 4), seed=n, max_tokens=24 + 3 * n, top_k=(0, 5)[n % 2])
        for n in range(15)
    ]
    others = [replace(case, verifier=("coupled", "rejection")[n % 2]) for n, case in enumerate(others)]
    for index in (0, 2, 4, 6):
        leader.call("step_times")
        completions = run_all(cluster.address, [*others[:7], CASES[index], *others[7:]])
        same_texts([completions[7]], [plain[index]])
        assert max(sequences for _, _, sequences, _ in leader.call("step_times")) >= 12, "there was no company"


@pytest.mark.parametrize("name", ["target", "random"])
def test_another_draft(testbed: Testbed, cluster: Cluster, plain: list[Completion], name: str) -> None:
    """A draft that always guesses right (the target itself), and one that never does."""
    cluster.use_drafts(testbed.draft(name))
    try:
        completions = run_all(cluster.address, [case.with_k(4) for case in CASES])  # whatever the load
    finally:
        cluster.use_drafts(testbed.draft("tiny"))
    same_texts(completions, plain)
    proposed, accepted = speculation(completions)
    assert proposed > 0
    if name == "target":
        assert accepted == proposed, "the same noise and the same distribution gave another token"
    else:
        assert accepted < 0.2 * proposed


def test_draft_killed_half_way(testbed: Testbed, cluster: Cluster, plain: list[Completion]) -> None:
    draft = testbed.new_draft(draft_id="doomed")
    half = sum(len(completion.token_ids) for completion in plain) // 2
    killed = threading.Event()

    def kill(num_tokens: int) -> None:
        if num_tokens >= half and not killed.is_set():
            killed.set()
            draft.kill()

    cluster.use_drafts(draft)
    try:
        completions = run_all(cluster.address, [case.with_k(4) for case in CASES], on_token=kill)
    finally:
        cluster.use_drafts(testbed.draft("tiny"))
    assert killed.is_set()
    same_texts(completions, plain)
    assert speculation(completions)[1] > 0, "the draft was not heard before it died"


def test_other_prefill_chunks(testbed: Testbed, plain: list[Completion]) -> None:
    """A step takes 20 rows, so that the long prompt comes in several chunks, some beside proposals of others."""
    target = testbed.target("small-chunks")
    with testbed.cluster(target, (testbed.draft("tiny"),)) as cluster:
        completions = run_all(cluster.address, CASES)
    same_texts(completions, plain)
    steps = target.leader.call("step_times")
    assert max(rows for _, _, _, rows in steps) <= 20
    assert max(completion.usage.prompt_tokens for completion in plain) > 2 * 20


def test_one_rank_against_two(testbed: Testbed, plain: list[Completion], tiny_tokens: Any) -> None:
    """The same text, or at the first token that differs the two best scores lie closer than ``GAP``."""
    with testbed.cluster(testbed.target("two"), (testbed.draft("tiny"),)) as cluster:
        alone = run_in_turn(cluster.address, [case.with_k(0) for case in CASES[:3]])
        completions = run_all(cluster.address, CASES)
    same_texts(completions[:3], alone)
    for case, one, two in zip(CASES, plain, completions, strict=True):
        assert two.reproducible
        pairs = zip(one.token_ids, two.token_ids, strict=False)
        same = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if same is None:
            assert one.token_ids == two.token_ids
            continue
        tokens = [*tiny_tokens(case.prompt), *one.token_ids[:same]]
        scores = testbed.oracle.scores(
            tokens, temperature=case.temperature, seed=case.seed, top_k=case.top_k, top_p=case.top_p
        )[-1]
        gap = float(abs(scores[one.token_ids[same]] - scores[two.token_ids[same]]))
        print(f"{case}: token {same} differs, scores lie {gap:.2e} apart")
        assert gap < GAP

"""What comes over the wire is what a decode of each session by itself gives, and the cache is that of the text."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.core.proposal import Proposal, proposal_fault
from outrider.core.sampling import Sampling, Verifier
from outrider.workers.draft.batcher import Batcher
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine

VOCAB_SIZE = 300
Connect = Callable[..., Any]
Decode = Callable[..., Any]

SETTINGS = [
    pytest.param(Sampling(temperature=0.0, verifier=Verifier.GREEDY), id="greedy"),
    pytest.param(Sampling(temperature=1.0, seed=7, verifier=Verifier.COUPLED), id="coupled"),
    pytest.param(Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=8, verifier=Verifier.COUPLED), id="coupled cut"),
    pytest.param(Sampling(temperature=1.0, seed=2**64 - 1, choice=3, verifier=Verifier.REJECTION), id="rejection"),
    pytest.param(
        Sampling(temperature=1.3, top_k=9, top_p=0.8, seed=9, verifier=Verifier.REJECTION), id="rejection cut"
    ),
]


def assert_equal(proposal: Proposal, plain: Any) -> None:
    assert proposal.tokens == plain.tokens
    assert [(row.token_ids.tolist(), row.probs.tolist()) for row in proposal.rows] == plain.rows
    assert proposal_fault(proposal, VOCAB_SIZE) is None


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("sampling", SETTINGS)
async def test_rounds_equal_a_plain_decode(
    worker: Any, connect: Connect, plain_decode: Decode, sampling: Sampling
) -> None:
    scheduler = await connect(worker)
    text = prompt_of(1, 150)  # three chunks
    await scheduler.open(5, text, sampling, num_tokens=6)
    accepted_counts = [0, 6, 3, 1, 6, 0]
    for accepted in accepted_counts:
        session_id, proposal = await scheduler.proposal()
        assert (session_id, proposal.base_len, proposal.drafter) == (5, len(text), "model")
        assert_equal(proposal, plain_decode(text, 6, sampling))
        assert bool(proposal.rows) == (sampling.verifier is Verifier.REJECTION)
        base = len(text)
        text += proposal.tokens[:accepted]
        text.append((text[-1] + 1) % VOCAB_SIZE)
        await scheduler.commit(5, text, base, num_tokens=6)
    worker.check_integrity()


async def test_sixteen_sessions_at_once_as_each_alone(worker: Any, connect: Connect, plain_decode: Decode) -> None:
    """Row invariance: steps that mix sessions, settings, prefill chunks and single rows change no bit of a proposal."""
    assert worker.facts["row_invariant"]
    scheduler = await connect(worker)
    settings = [parameter.values[0] for parameter in SETTINGS]
    samplings = {session_id: settings[session_id % len(settings)] for session_id in range(16)}
    texts = {session_id: prompt_of(session_id, 1 + 11 * session_id) for session_id in range(16)}
    for session_id, text in texts.items():
        await scheduler.open(session_id, text, samplings[session_id], num_tokens=5)
    for _ in range(16 * 4):
        session_id, proposal = await scheduler.proposal()
        text = texts[session_id]
        assert proposal.base_len == len(text)
        assert_equal(proposal, plain_decode(text, 5, samplings[session_id]))
        base = len(text)
        text += [*proposal.tokens[: session_id % 4], session_id]
        await scheduler.commit(session_id, text, base, num_tokens=5)
    most = worker.inspect(lambda batcher: batcher.num_steps)
    assert most < 16 * 5 * 5  # steps were shared
    worker.check_integrity()


async def test_random_rounds_leave_the_cache_of_the_text(
    worker: Any, connect: Connect, plain_engine: Engine, plain_decode: Decode
) -> None:
    """k of 1 to 8, random rejections, commits that come late, within a proposal, or agree with what was drafted.

    Every proposal is what its base gives; now and then the worker's cache is compared, bit by bit, with one rebuilt
    from the tokens.
    """
    rng = random.Random(3)
    scheduler = await connect(worker)
    sampling = Sampling(temperature=0.5, seed=4, verifier=Verifier.REJECTION)
    texts = {session_id: prompt_of(session_id, 20 + session_id) for session_id in range(3)}
    compared = agreed = disagreed = 0
    for session_id, text in texts.items():
        await scheduler.open(session_id, text, sampling, num_tokens=rng.randint(1, 8))
    for number in range(90):
        session_id, proposal = await scheduler.proposal()
        text = texts[session_id]
        base_text = text[: proposal.base_len]
        if number % 3 == 0:
            assert_equal(proposal, plain_decode(base_text, len(proposal.tokens), sampling))
        base = len(text)
        if proposal.base_len == base and rng.random() < 0.7:
            text += proposal.tokens[: rng.randint(0, len(proposal.tokens))]
        agrees = rng.random() < 0.4
        if agrees:  # as a plain step that happens to agree: no token beside the drafted ones
            text += plain_decode(text, 1, sampling).tokens if text[base:] == [] else []
        else:
            text.append(rng.randrange(VOCAB_SIZE))
        agreed, disagreed = agreed + agrees, disagreed + (not agrees)
        await scheduler.commit(session_id, text, base, num_tokens=rng.randint(1, 8))
        if rng.random() < 0.3:  # another one on its heels: the first's proposal, if it came, is late
            text.append(rng.randrange(VOCAB_SIZE))
            await scheduler.commit(session_id, text, len(text) - 1, num_tokens=rng.randint(1, 8))
        if number % 6 == 5:
            compared += worker.inspect(lambda batcher: compare_caches(batcher, plain_engine))
    assert agreed > 20
    assert disagreed > 20
    assert compared > 500
    worker.check_integrity()


def compare_caches(batcher: Batcher, plain_engine: Engine) -> int:
    """Compare, bit by bit, the caches of all sessions with rebuilt ones. Returns the number of positions."""
    batcher.check_integrity()
    compared = 0
    for session in batcher.sessions.values():
        text = session.text.tokens[: session.kv_len]
        table = range(-(-max(1, len(text)) // plain_engine.block_size))
        for start in range(0, len(text), 64):
            plain_engine.forward([SequenceRows(text[start : start + 64], start, table, ())])
        rebuilt = plain_engine.read_kv(table, len(text))
        held = batcher._drafter.engine.read_kv(session.blocks, len(text))  # type: ignore[attr-defined]
        for (key, value), (held_key, held_value) in zip(rebuilt, held, strict=True):
            assert torch.equal(key, held_key)
            assert torch.equal(value, held_value)
        compared += len(text)
    return compared


async def test_several_proposals_in_flight_are_sent_newest_only_or_in_order(
    worker: Any, connect: Connect, plain_decode: Decode
) -> None:
    """Commits faster than proposals: whatever arrives continues a base that was committed, and the last one comes."""
    scheduler = await connect(worker)
    sampling = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
    text = prompt_of(2, 30)
    await scheduler.open(1, text, sampling)
    for token in range(20):
        text.append(token)
        await scheduler.commit(1, text, len(text) - 1)
    last_base = 0
    while last_base < len(text):
        _, proposal = await scheduler.proposal()
        assert proposal.base_len > last_base
        last_base = proposal.base_len
        assert_equal(proposal, plain_decode(text[:last_base], 4, sampling))


async def test_padding_of_the_head_is_never_proposed(worker: Any, connect: Connect) -> None:
    """M2. The padding rows' logits are 50 times as large as any other's."""
    scheduler = await connect(worker, hello=False)
    hello = await scheduler.hello(vocab_size=EMBEDDING_ROWS_OF_THE_TARGET)
    assert hello.vocab_size == VOCAB_SIZE
    for session_id, sampling in enumerate(parameter.values[0] for parameter in SETTINGS):
        await scheduler.open(session_id, prompt_of(session_id, 8), sampling, num_tokens=16)
        _, proposal = await scheduler.proposal()
        assert max(proposal.tokens) < VOCAB_SIZE
        assert all(row.token_ids.max() < VOCAB_SIZE for row in proposal.rows)


EMBEDDING_ROWS_OF_THE_TARGET = 384


# -- statistics --------------------------------------------------------------------------------------------------------

NUM_BINS = 20
FALSE_ALARM_RATE = 1e-6


def fit_to_rows(proposals: list[Proposal], tokens: list[tuple[int, ...]], seed: int = 0) -> float:
    """p-value that each token was drawn from its row.

    A token's randomised probability integral transform, a uniform point of the token's own stretch of the row's
    cumulative distribution, is uniform if it was; Pearson's chi-square over equal bins.
    """
    rng = np.random.default_rng(seed)
    counts = np.zeros(NUM_BINS)
    for proposal, drawn in zip(proposals, tokens, strict=True):
        for token, row in zip(drawn, proposal.rows, strict=True):
            order = np.argsort(-row.probs, kind="stable")  # likeliest first: a bias towards likely tokens shows
            ids, probs = row.token_ids[order], row.probs[order].astype(np.float64)
            place = int(np.flatnonzero(ids == token)[0])
            point = probs[:place].sum() + rng.random() * probs[place]
            counts[min(NUM_BINS - 1, int(point * NUM_BINS))] += 1
    return float(stats.chisquare(counts).pvalue)


async def test_drawn_tokens_follow_the_sent_rows(worker: Any, connect: Connect, plain_decode: Decode) -> None:
    """Over 300 prefixes and seeds, 8 tokens each. False alarms: one in a million runs (and the seeds are fixed).

    The same check must see two planted bugs: tokens that are the argmax of their row (S4), and tokens drawn at half the
    temperature of the rows.
    """
    scheduler = await connect(worker)
    proposals = []
    for session_id in range(300):
        sampling = Sampling(temperature=2.0, seed=1000 + session_id, verifier=Verifier.REJECTION)
        await scheduler.open(session_id, prompt_of(session_id, 5), sampling, num_tokens=8)
    for _ in range(300):
        proposals.append((await scheduler.proposal())[1])
    for proposal in proposals:
        for row in proposal.rows:
            assert len(row.token_ids) <= 16
            assert row.probs.dtype == np.float32
            assert abs(float(row.probs.sum(dtype=np.float64)) - 1.0) < 1e-5
    assert fit_to_rows(proposals, [proposal.tokens for proposal in proposals]) > FALSE_ALARM_RATE

    argmax = [tuple(int(row.token_ids[row.probs.argmax()]) for row in proposal.rows) for proposal in proposals]
    assert fit_to_rows(proposals, argmax) < FALSE_ALARM_RATE
    rng = np.random.default_rng(1)
    colder = []
    for proposal in proposals:
        drawn = []
        for row in proposal.rows:
            weights = row.probs.astype(np.float64) ** 2
            drawn.append(int(rng.choice(row.token_ids, p=weights / weights.sum())))
        colder.append(tuple(drawn))
    assert fit_to_rows(proposals, colder) < FALSE_ALARM_RATE


async def test_rows_are_the_truncated_distribution(worker: Any, connect: Connect, plain_decode: Decode) -> None:
    """Against a softmax written here: temperature, then the 16 likeliest tokens, renormalised."""
    scheduler = await connect(worker)
    sampling = Sampling(temperature=1.5, seed=3, verifier=Verifier.REJECTION)
    text = prompt_of(4, 12)
    await scheduler.open(1, text, sampling, num_tokens=8)
    _, proposal = await scheduler.proposal()
    plain = plain_decode(text, 8, sampling)
    for row, logits in zip(proposal.rows, plain.logits, strict=True):
        probs = torch.softmax(logits.double() / 1.5, dim=-1)
        top = torch.topk(probs, 16)
        assert set(row.token_ids.tolist()) == set(top.indices.tolist())
        expected = (probs / top.values.sum())[torch.from_numpy(row.token_ids)]
        np.testing.assert_allclose(row.probs, expected.numpy(), rtol=1e-5)

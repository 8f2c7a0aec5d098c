"""The batched kernels against the reference, over random settings, and rows against themselves alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.controls import RowText
from outrider.core.logprobs import LogprobsMode, TokenLogprobs
from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched import verify as batched_verify
from outrider.kernels.batched import wide
from outrider.kernels.batched.data import Ask, Chain, Outcome
from outrider.kernels.batched.draft import Draw, draw
from outrider.kernels.batched.logprobs import score
from outrider.kernels.batched.verify import verify
from outrider.kernels.cpu.draws import load_draws
from outrider.kernels.reference import draft
from outrider.kernels.reference.chain import draw_from, token_logprobs, verify_one
from outrider.kernels.reference.distribution import distribution
from outrider.kernels.reference.errors import InvalidLogitsError, NothingAllowedError
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.transforms import truncate
from outrider.kernels.reference.verify import verify_chain

from .strategies import CONTROL_VALUES, VOCAB_SIZE, masks, row_of, samplings, texts


@pytest.fixture(scope="module", autouse=True, params=["torch", "compiled"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows that torch handles, and rows for which passes over the vocabulary are compiled, where they can be."""
    if request.param == "compiled" and load_draws() is None:
        pytest.skip("no compiled kernels here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "MIN_WIDTH", 1 if request.param == "compiled" else 1 << 60)
        yield


EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def chains(draw_: st.DrawFn, names: tuple[str, ...] = tuple(CONTROL_VALUES)) -> Chain:
    """A chain as a draft with the same settings proposes it, and now and then a worse one."""
    sampling = draw_(samplings(names))
    text = draw_(texts(sampling))
    seed, is_coarse = draw_(st.integers(0, 2**31)), draw_(st.booleans())
    k = draw_(st.integers(0, 4))
    logits = row_of(seed, num_rows=k + 1, is_coarse=is_coarse)
    allowed = draw_(masks(k + 1))
    near = logits[:k] + torch.randn(k, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 0.5
    proposal: list[int] = []
    rows = []
    for i in range(k):
        ask = Ask(sampling, len(text) + i, i, [*text, *proposal], None if allowed is None else allowed[i])
        (drawn,) = draw(near[i : i + 1], [ask], top_m=draw_(st.sampled_from([1, 4, 64])))
        if drawn is None:
            break
        proposal.append(drawn.token)
        rows.append((drawn.token_ids, drawn.probs))
    broken = draw_(st.sampled_from(["", "", "", "token", "outside", "row", "one-hot", "logits"]))
    if proposal and broken in ("token", "outside"):
        proposal[-1] = 5 if broken == "token" else VOCAB_SIZE + 3
    if rows and broken == "row":
        rows[-1] = (torch.tensor([proposal[-1], 1]), torch.tensor([0.9, math.nan]))
    if broken == "logits":
        logits[-1, 2] = math.nan
    is_rejection = sampling.verifier is Verifier.REJECTION and broken != "one-hot"
    kept = len(proposal) + 1
    return Chain(
        logits[:kept],
        sampling,
        len(text),
        proposal,
        rows if is_rejection else [],
        text,
        None if allowed is None else allowed[:kept],
    )


def assert_same_logprobs(actual: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert actual.token_id == expected.token_id
    assert actual.rank == expected.rank
    assert actual.top_ids == expected.top_ids
    assert actual.logprob == pytest.approx(expected.logprob, abs=1e-9)
    assert actual.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-9)


def assert_same(actual: Outcome, expected: Outcome) -> None:
    assert replace(actual, logprobs=()) == replace(expected, logprobs=())
    assert len(actual.logprobs) == len(expected.logprobs)
    for one, other in zip(actual.logprobs, expected.logprobs, strict=True):
        assert_same_logprobs(one, other)


@given(batch=st.lists(chains(), min_size=1, max_size=6), at_once=st.booleans())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_outcomes_equal_the_reference(batch: list[Chain], at_once: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_verify, "_SMALL", 1 << 18 if at_once else 0)
        for actual, chain in zip(verify(batch), batch, strict=True):
            assert_same(actual, verify_one(chain))


@pytest.mark.parametrize("name", CONTROL_VALUES)
def test_outcomes_equal_the_reference_under_each_control(name: str) -> None:
    @given(batch=st.lists(chains((name,)), min_size=1, max_size=3))
    @settings(max_examples=40, deadline=None, derandomize=True)
    def check(batch: list[Chain]) -> None:
        for actual, chain in zip(verify(batch), batch, strict=True):
            assert_same(actual, verify_one(chain))

    check()


@given(batch=st.lists(chains(), min_size=2, max_size=6), at_once=st.booleans())
@EXAMPLES
def test_chains_of_a_batch_are_independent_bit_for_bit(batch: list[Chain], at_once: bool) -> None:
    """Case S6. Log-probabilities are compared as they are: not one bit depends on the company."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_verify, "_SMALL", 1 << 18 if at_once else 0)
        together = verify(batch)
        assert together == [verify([chain])[0] for chain in batch]
        assert together[::-1] == verify(batch[::-1])


@given(batch=st.lists(chains(), min_size=1, max_size=5))
@EXAMPLES
def test_nothing_that_was_given_is_changed(batch: list[Chain]) -> None:
    before = [chain.logits.clone() for chain in batch]
    first = verify(batch)
    for chain, copy in zip(batch, before, strict=True):
        assert torch.equal(chain.logits.nan_to_num(nan=7.5), copy.nan_to_num(nan=7.5))
    assert verify(batch) == first


@st.composite
def asks(draw_: st.DrawFn) -> tuple[torch.Tensor, Ask]:
    """A row [V] and what is asked for it."""
    sampling = draw_(samplings())
    text = draw_(texts(sampling))
    row = row_of(draw_(st.integers(0, 2**31)), is_coarse=draw_(st.booleans()))[0]
    if draw_(st.integers(0, 9)) == 0:
        row[2] = math.nan
    allowed = draw_(masks(1))
    behind = draw_(st.lists(st.integers(0, 5), max_size=2))  # tokens of later rows, which must not count
    prefix_hash = draw_(st.integers(0, 2**64 - 1))
    return row, Ask(sampling, len(text), prefix_hash, [*text, *behind], None if allowed is None else allowed[0])


def slow_draw(row: torch.Tensor, ask: Ask, top_m: int) -> Draw | None:
    sampling, text = ask.sampling, RowText(ask.text, ask.position, ask.sampling.prompt_len)
    try:
        log_probs = distribution(row, sampling, text, ask.allowed)
    except (InvalidLogitsError, NothingAllowedError):
        return None
    if sampling.verifier is Verifier.GREEDY:
        return Draw(int(log_probs.argmax()))
    if sampling.verifier is Verifier.COUPLED:
        return Draw(draw_from(log_probs, sampling, ask.position, Purpose.COUPLED))
    token_ids, probs = truncate(log_probs, top_m)
    sent = torch.full_like(log_probs, -torch.inf)
    sent[token_ids] = probs.to(torch.float64).log()
    return Draw(draw_from(sent, sampling, ask.position, Purpose.DRAFT, ask.prefix_hash), token_ids, probs)


@given(batch=st.lists(asks(), min_size=1, max_size=6), top_m=st.sampled_from([1, 5, 64]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_draws_equal_the_reference_and_are_independent(batch: list[tuple[torch.Tensor, Ask]], top_m: int) -> None:
    logits, questions = torch.stack([row for row, _ in batch]), [ask for _, ask in batch]
    for index, drawn in enumerate(draw(logits, questions, top_m=top_m)):
        expected = slow_draw(logits[index], questions[index], top_m)
        (alone,) = draw(logits[index : index + 1], questions[index : index + 1], top_m=top_m)
        if expected is None or drawn is None or alone is None:
            assert drawn is expected is alone
            continue
        assert drawn.token == expected.token == alone.token
        if questions[index].sampling.verifier is not Verifier.REJECTION:
            assert drawn.token_ids is drawn.probs is None
            continue
        assert torch.equal(drawn.token_ids, expected.token_ids)
        torch.testing.assert_close(drawn.probs, expected.probs, rtol=1e-6, atol=0)
        assert torch.equal(drawn.token_ids, alone.token_ids)
        assert torch.equal(drawn.probs, alone.probs)  # bit for bit
        assert float(drawn.probs.min()) > 0.0
        assert drawn.token in drawn.token_ids


@given(
    seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=7),
    is_coarse=st.booleans(),
    num_top=st.sampled_from([0, 1, 5, 20, 24, 99]),
)
@EXAMPLES
def test_raw_log_probabilities_are_those_of_the_model(seeds: list[int], is_coarse: bool, num_top: int) -> None:
    logits = torch.cat([row_of(seed, is_coarse=is_coarse) for seed in seeds])
    tokens = [seed % VOCAB_SIZE for seed in seeds]
    scored = score(logits, tokens, num_top)
    assert len(scored) == len(seeds)
    for index, entry in enumerate(scored):
        log_probs = torch.log_softmax(logits[index].double(), -1)
        assert_same_logprobs(entry, token_logprobs(log_probs, tokens[index], num_top))
        assert [entry] == score(logits[index : index + 1], tokens[index : index + 1], num_top)


PLAIN = [{}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.7}]


@pytest.mark.parametrize("options", PLAIN, ids=str)
@pytest.mark.parametrize("verifier", list(Verifier))
def test_plain_settings_give_what_chains_of_one_setting_give(verifier: Verifier, options: dict) -> None:
    """``verify`` and ``verify_chain``, ``draw`` and ``draw_rows`` are one function where there are no controls."""
    temperature = 0.0 if verifier is Verifier.GREEDY else 0.9
    accepted = 0
    for seed in range(60):
        sampling = Sampling(temperature=temperature, seed=seed, verifier=verifier, **options)
        logits = row_of(seed, num_rows=4)
        near = logits[:3] + torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 0.3
        settings_of_one = {"temperature": temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "choice": 0}
        settings_of_one |= {"seed": seed, "verifier": verifier.label}
        drawn = draw(near, [Ask(sampling, 10 + i, i) for i in range(3)], top_m=5)
        for i, one in enumerate(drawn):
            token, ids, probs = draft.draw(near[i], 10 + i, prefix_hash=i, top_m=5, **settings_of_one)
            assert one is not None
            assert one.token == token
            if ids is not None:
                assert torch.equal(one.token_ids, ids)
                torch.testing.assert_close(one.probs, probs, rtol=1e-6, atol=0)
        tokens = [one.token for one in drawn]
        rows = [(one.token_ids, one.probs) for one in drawn] if verifier is Verifier.REJECTION else []
        (outcome,) = verify([Chain(logits, sampling, 10, tokens, rows)])
        verdict = verify_chain(logits, tokens, rows, first_position=10, **settings_of_one)
        assert (outcome.num_accepted, outcome.next_token) == (verdict.num_accepted, verdict.next_token)
        accepted += outcome.num_accepted
    assert 30 < accepted < 180


FULL_VOCAB = 151_936
FULL_CONTROLS: list[dict] = [
    {},
    {"top_k": 50},
    {"top_p": 0.95},
    {"top_k": 700, "top_p": 0.8},
    {"controls": (("min_p", 0.0137),)},
    {"controls": (("typical_p", 0.8713),), "top_p": 0.97},
    {"controls": (("allowed_token_ids", tuple(range(0, FULL_VOCAB, 977))), ("frequency_penalty", 0.7))},
    {"controls": (("bad_words", ((5,), (7, 9))), ("presence_penalty", -0.7), ("repetition_penalty", 1.3))},
]


def test_a_full_vocabulary_gives_the_reference_and_rows_are_independent() -> None:
    """Wide rows take ways that narrow ones do not: chains advance row by row, and supports have many widths."""
    rank = torch.arange(FULL_VOCAB, dtype=torch.float64)
    by_rank = (-1.2 * (rank + 1).log()).clamp(min=-13.0)
    batch: list[Chain] = []
    for number, options in enumerate(FULL_CONTROLS * 2):
        generator = torch.Generator().manual_seed(number)
        verifier = Verifier.COUPLED if number < len(FULL_CONTROLS) else Verifier.REJECTION
        logprobs = {"logprobs": 5, "logprobs_mode": list(LogprobsMode)[number % 2]}
        sampling = Sampling(temperature=0.9, seed=number, verifier=verifier, prompt_len=4, **logprobs, **options)
        order = torch.randperm(FULL_VOCAB, generator=generator)
        noise = torch.randn(3, FULL_VOCAB, generator=generator, dtype=torch.float64)
        logits = (by_rank[order] + 0.3 * noise).float()
        text, proposal, rows = [7, 9, 5, 11, 9, 7], [], []
        for i in range(2):
            ask = Ask(sampling, 6 + i, i, [*text, *proposal])
            (drawn,) = draw(logits[i : i + 1] + 0.1, [ask], top_m=64)
            proposal.append(drawn.token)
            rows.append((drawn.token_ids, drawn.probs))
        batch.append(Chain(logits, sampling, 6, proposal, rows if verifier is Verifier.REJECTION else [], text))
    outcomes = verify(batch)
    assert sum(outcome.num_accepted for outcome in outcomes) > len(batch)
    for outcome, chain in zip(outcomes, batch, strict=True):
        assert outcome == verify([chain])[0]  # bit for bit
        assert_same(outcome, verify_one(chain))


def test_shapes_are_checked() -> None:
    chain = Chain(row_of(1, num_rows=3), Sampling(), 4, [1, 2])
    row = (torch.tensor([1]), torch.tensor([1.0]))
    rejection = replace(chain.sampling, verifier=Verifier.REJECTION)
    penalised = replace(chain.sampling, controls=(("presence_penalty", 0.5),))
    broken = {
        "3 logits rows fit 2 proposals, not 1": replace(chain, draft_tokens=[1]),
        "2 proposals need as many q rows, not 1": replace(chain, sampling=rejection, draft_rows=[row]),
        "the grammar's mask is (2, 24), and the logits (3, 24)": replace(chain, allowed=torch.ones(2, 24).bool()),
        "the text before position 4 has 3 tokens": replace(chain, sampling=penalised, text=[1, 2, 3]),
    }
    outcomes = verify([*broken.values(), chain])
    assert [outcome.error for outcome in outcomes] == [*broken, None]
    assert not any(outcome.is_invalid_logits for outcome in outcomes)
    with pytest.raises(ValueError, match="2 rows of logits, but 1 asks"):
        draw(row_of(1, num_rows=2), [Ask(Sampling(), 4)], top_m=5)
    assert verify([]) == draw(row_of(1)[:0], [], top_m=5) == score(row_of(1)[:0], [], 5) == []

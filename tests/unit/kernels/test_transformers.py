"""Distributions against transformers' own logits processors, row by row: each control that transformers has, alone and
all together in the order in which transformers applies them."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.controls import RowText
from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched.rows import Row, processed, supports
from outrider.kernels.reference.distribution import distribution

from .strategies import CONTROL_VALUES, VOCAB_SIZE, row_of, samplings, texts

THEIRS = tuple(name for name in CONTROL_VALUES if name not in ("presence_penalty", "frequency_penalty"))


def their_processors(sampling: Sampling) -> list[LogitsProcessor]:
    """What applies before the temperature, in the order of transformers' ``_get_logits_processor``."""
    values = dict(sampling.controls)
    before: list[LogitsProcessor] = []
    if biases := values.get("logit_bias"):
        before.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases}))
    if penalty := values.get("repetition_penalty"):
        before.append(RepetitionPenaltyLogitsProcessor(penalty))
    if words := values.get("bad_words"):
        before.append(NoBadWordsLogitsProcessor([list(word) for word in words]))
    if min_tokens := values.get("min_tokens"):
        number, ends = min_tokens
        before.append(MinNewTokensLengthLogitsProcessor(sampling.prompt_len, number, list(ends)))
    if allowed := values.get("allowed_token_ids"):
        before.append(PrefixConstrainedLogitsProcessor(lambda batch, tokens: list(allowed), 1))
    if banned := values.get("banned_token_ids"):
        before.append(SuppressTokensLogitsProcessor(list(banned)))
    return before


def their_warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """What applies from the temperature on, in transformers' order."""
    values = dict(sampling.controls)
    after: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k > 0:
        after.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        after.append(TopPLogitsWarper(sampling.top_p))
    if min_p := values.get("min_p"):
        after.append(MinPLogitsWarper(min_p))
    if typical_p := values.get("typical_p"):
        after.append(TypicalLogitsWarper(typical_p))
    return after


def their_distribution(row: torch.Tensor, sampling: Sampling, text: list[int]) -> torch.Tensor:
    """Log-probabilities [V] float64. Warpers run in float64, as ours do."""
    tokens = torch.tensor([text], dtype=torch.int64)
    scores = LogitsProcessorList(their_processors(sampling))(tokens, row[None].clone())
    if sampling.temperature == 0.0:
        certain = torch.full((len(row),), -torch.inf, dtype=torch.float64)
        certain[int(scores[0].argmax())] = 0.0
        return certain
    return torch.log_softmax(LogitsProcessorList(their_warpers(sampling))(tokens, scores.double())[0], dim=-1)


def batched_distributions(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """What the batched kernels draw from, spread over the vocabulary: [n, V] float64."""
    dense = torch.full(logits.shape, -torch.inf, dtype=torch.float64)
    for group in supports(processed(logits, rows, may_change=False).logits, rows, range(len(rows))):
        log_probs = torch.log_softmax(group.support.scores, dim=-1)
        dense[torch.tensor(group.members)[:, None], group.support.token_ids] = log_probs
    return dense


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(torch.isfinite(actual), torch.isfinite(expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@st.composite
def rows(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[torch.Tensor, Row]:
    sampling = draw(samplings(names))
    text = draw(texts(sampling).filter(len))  # transformers does not know empty ones
    logits = row_of(draw(st.integers(0, 2**31)))[0]
    values = dict(sampling.controls)
    # Where nothing else is left, our min_tokens lets the text end, and transformers samples from NaN.
    allowed = set(values.get("allowed_token_ids", range(VOCAB_SIZE))) - set(values.get("banned_token_ids", ()))
    allowed -= {word[-1] for word in values.get("bad_words", ())}
    assume(allowed - set(values.get("min_tokens", (0, ()))[1]))
    return logits, Row(sampling, RowText(text, len(text), sampling.prompt_len))


def compare(batch: list[tuple[torch.Tensor, Row]]) -> None:
    expected = [their_distribution(logits, row.sampling, list(row.text.tokens)) for logits, row in batch]
    for (logits, row), wanted in zip(batch, expected, strict=True):
        assert_same(distribution(logits, row.sampling, row.text), wanted)
    sampled = [index for index, (_, row) in enumerate(batch) if row.sampling.verifier is not Verifier.GREEDY]
    if sampled:
        logits = torch.stack([batch[index][0] for index in sampled])
        actual = batched_distributions(logits, [batch[index][1] for index in sampled])
        assert_same(actual, torch.stack([expected[index] for index in sampled]))


@given(data=st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_one_control_gives_what_transformers_gives(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(THEIRS))
    compare(data.draw(st.lists(rows((name,)), min_size=1, max_size=3)))


@given(batch=st.lists(rows(THEIRS), min_size=1, max_size=6))
@settings(max_examples=250, deadline=None, derandomize=True)
def test_controls_together_give_what_transformers_gives_in_its_order(batch: list[tuple[torch.Tensor, Row]]) -> None:
    compare(batch)


def test_a_full_vocabulary_gives_what_transformers_gives() -> None:
    """Wide rows take ways that narrow ones do not: typical_p ranks 1,024 tokens before it ranks all."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 151_936, (300,), generator=generator).tolist()
    for spread, typical_p in ((0.3, 0.9), (3.0, 0.9), (3.0, 0.2), (8.0, 0.99)):
        controls = (("min_p", 1e-5), ("repetition_penalty", 1.3), ("typical_p", typical_p))
        for chosen in (controls, controls[1:2], controls[2:]):
            sampling = Sampling(temperature=0.7, controls=chosen, prompt_len=100)
            logits = torch.randn(151_936, generator=generator) * spread
            row = Row(sampling, RowText(text, 300, 100))
            wanted = their_distribution(logits, sampling, text)
            assert_same(batched_distributions(logits[None], [row])[0], wanted)

"""Filters against transformers' own warpers, and where those leave the outcome open, against the definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider.kernels.reference import transforms
from outrider.kernels.reference.errors import InvalidLogitsError

SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for temperature in (0.3, 0.8, 1.0, 1.7)
    for top_k in (0, 1, 5, 40)
    for top_p in (1.0, 0.95, 0.5, 0.01)
]


def warped(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Log-probabilities by transformers, in float64."""
    scores = TemperatureLogitsWarper(temperature)(None, logits.to(torch.float64))
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return torch.log_softmax(scores, dim=-1)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(torch.isfinite(actual), torch.isfinite(expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_rows_equal_transformers(options: dict) -> None:
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(1)) * 3
    together = transforms.log_probs(logits, **options)
    assert together.dtype == torch.float64
    for i in range(len(logits)):
        row = logits[i : i + 1]
        assert_same(transforms.log_probs(row, **options), warped(row, **options))
        assert_same(together[i : i + 1], warped(row, **options))


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_rows_do_not_disturb_each_other(options: dict) -> None:
    """Case S6, by bits: what a row keeps, and the scores that coupled draws compare, are the same in a batch."""
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(1)) * 3
    together = transforms.filtered(logits, **options)
    for i in range(len(logits)):
        alone = transforms.filtered(logits[i : i + 1], **options)
        kept, kept_together = torch.isfinite(alone.scores[0]), torch.isfinite(together.scores[i])
        assert torch.equal(alone.token_ids[0, kept], together.token_ids[i, kept_together])
        assert torch.equal(alone.scores[0, kept], together.scores[i, kept_together])


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("options", [{"top_k": 50}, {"top_p": 0.95}, {"top_k": 2000, "top_p": 0.9}, {}], ids=str)
def test_a_full_vocabulary_equals_transformers(options: dict, spread: float) -> None:
    options = {"temperature": 0.8, "top_k": 0, "top_p": 1.0} | options
    # float64 keeps the values distinct; as float32 many of 151,936 would be equal.
    logits = torch.randn(1, 151_936, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * spread
    assert_same(transforms.log_probs(logits, **options), warped(logits, **options))


def slow_log_probs(row: list[float], *, temperature: float, top_k: int, top_p: float) -> list[float]:
    """The definition: rank by (logit, lower id first), cut, cut, normalise."""
    ranking = sorted(range(len(row)), key=lambda token: (-row[token], token))
    ranking = [token for token in ranking if row[token] > -math.inf][: top_k or None]
    weights = {token: math.exp((row[token] - row[ranking[0]]) / temperature) for token in ranking}
    total = math.fsum(weights.values())
    kept, mass = [], 0.0
    for token in ranking:
        if kept and top_p < 1.0 and mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    total = math.fsum(weights[token] for token in kept)
    return [
        math.log(weights[token] / total) if token in kept and weights[token] else -math.inf for token in range(len(row))
    ]


@given(
    rows=st.lists(
        # Quarters: ties everywhere. Some tokens are banned.
        st.lists(st.sampled_from([-math.inf, *(0.25 * i for i in range(-8, 9))]), min_size=9, max_size=9),
        min_size=1,
        max_size=4,
    ).filter(lambda rows: all(any(value > -math.inf for value in row) for row in rows)),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    top_k=st.integers(0, 10),
    # Masses of such rows do not fall on these by accident of rounding.
    top_p=st.sampled_from([1.0, 0.9137, 0.6181, 0.3331, 0.0001]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_ties_and_bans_follow_the_definition(
    rows: list[list[float]], temperature: float, top_k: int, top_p: float
) -> None:
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    actual = transforms.log_probs(torch.tensor(rows), **options)
    expected = torch.tensor([slow_log_probs(row, **options) for row in rows], dtype=torch.float64)
    assert_same(actual, expected)


def test_equal_logits_are_cut_at_the_lower_id() -> None:
    flat = torch.zeros(1, 8)
    assert torch.isfinite(transforms.log_probs(flat, top_k=3)[0]).tolist() == [True] * 3 + [False] * 5
    assert torch.isfinite(transforms.log_probs(flat, top_p=0.45)[0]).tolist() == [True] * 4 + [False] * 4
    assert transforms.log_probs(flat, temperature=0.0)[0].tolist() == [0.0] + [-math.inf] * 7


def test_top_k_with_temperature_not_given_means_temperature_1() -> None:
    """Case S5."""
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(3))
    by_default = transforms.log_probs(logits, top_k=50)
    assert torch.equal(by_default, transforms.log_probs(logits, temperature=1.0, top_k=50, top_p=1.0))
    assert_same(by_default, warped(logits, temperature=1.0, top_k=50, top_p=1.0))
    assert float(by_default.max()) < math.log(0.5)  # nothing like temperature 0


def test_an_unfiltered_row_is_the_softmax() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(4))
    assert torch.equal(transforms.log_probs(logits), torch.log_softmax(logits.double(), -1))
    assert torch.equal(transforms.log_probs(logits, top_k=50), transforms.log_probs(logits))
    assert torch.equal(transforms.log_probs(logits, top_k=5000), transforms.log_probs(logits))


def test_filtering_finds_few_columns_and_keeps_order() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(5)) * 4
    support = transforms.filtered(logits, temperature=0.7, top_k=20, top_p=0.9)
    kept = support.token_ids[0].tolist()
    assert 0 < len(kept) <= 20
    assert kept == sorted(set(kept))
    columns, found = support.columns(torch.tensor([[kept[-1], 4999, 0]]))
    assert columns[0, 0] == len(kept) - 1
    assert found[0].tolist() == [True, 4999 in kept, 0 in kept]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_invalid_rows_are_named(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 3] = bad
    assert transforms.valid_rows(logits).tolist() == [True, False, True]
    with pytest.raises(InvalidLogitsError, match="row 1"):
        transforms.log_probs(logits)
    with pytest.raises(InvalidLogitsError, match="row 0"):
        transforms.log_probs(torch.full((1, 5), -math.inf))
    assert transforms.valid_rows(torch.tensor([[-math.inf, 0.0]])).tolist() == [True]


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}])
def test_settings_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"must be|above 0"):
        transforms.log_probs(torch.zeros(1, 5), **options)


def test_truncation_keeps_the_most_likely_and_renormalises() -> None:
    row = torch.log_softmax(torch.randn(1000, generator=torch.Generator().manual_seed(6)).double() * 2, -1)
    token_ids, probs = transforms.truncate(row, 64)
    expected = row.topk(64).indices.sort().values
    assert torch.equal(token_ids, expected)
    assert probs.dtype == torch.float32
    weights = row[expected].exp()
    torch.testing.assert_close(probs.double(), weights / weights.sum(), rtol=1e-7, atol=0)
    assert abs(float(probs.double().sum()) - 1.0) < 64 * 2.0**-25


def test_truncation_drops_what_has_no_probability_and_breaks_ties_by_id() -> None:
    row = torch.tensor([-math.inf, 0.0, -200.0, 0.0, 0.0], dtype=torch.float64)
    token_ids, probs = transforms.truncate(row, 4)  # e^-200 is 0 in float32
    assert token_ids.tolist() == [1, 3, 4]
    torch.testing.assert_close(probs, torch.full((3,), 1 / 3))
    assert transforms.truncate(row, 2)[0].tolist() == [1, 3]
    with pytest.raises(ValueError, match="top_m"):
        transforms.truncate(row, 0)


def test_rows_are_packed_to_what_they_keep() -> None:
    kept = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    columns = transforms.packed_columns(kept, 3)
    assert columns.tolist() == [[0, 2, 4], [0, 1, 5], [0, 1, 2]]  # filled up with the first of the others
    everything = transforms.packed_columns(kept, 6)
    assert everything.tolist() == [list(range(6))] * 3
    scores = torch.arange(18, dtype=torch.float64).view(3, 6)
    full = transforms.Support(torch.arange(6).expand(3, 6), scores, is_full=True)
    narrow = transforms.narrowed(full, kept, 3)
    assert not narrow.is_full
    assert narrow.token_ids.tolist() == columns.tolist()
    assert narrow.scores.tolist() == [[-math.inf, 2, 4], [-math.inf, -math.inf, 11], [12, 13, 14]]
    again = transforms.narrowed(narrow, narrow.scores > 12, 2)
    assert again.token_ids.tolist() == [[0, 2], [0, 1], [1, 2]]
    assert transforms.narrowed(full, kept, 6).is_full

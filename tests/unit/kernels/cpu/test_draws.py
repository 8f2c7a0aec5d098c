"""The compiled passes over a vocabulary answer as torch, on each instruction set of the machine."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.cpu import instruction_sets
from outrider.kernels.cpu.draws import Draws, Filters, load_draws
from outrider.kernels.reference import noise, rejection, sampling, transforms
from outrider.kernels.reference.noise import Purpose

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)
KINDS = ("model", "flat", "coarse", "all equal", "one", "banned", "sharp", "huge", "tiny")
BROKEN = {"nan": math.nan, "inf": math.inf}


@pytest.fixture(scope="module", params=["avx2", "avx512"])
def draws(request: pytest.FixtureRequest) -> Draws:
    found = load_draws(request.param)
    if found is None:
        pytest.skip(f"this machine has {instruction_sets() or 'no kernels'}")
    return found


def row_of(kind: str, size: int, seed: int) -> Tensor:
    """[size] float32"""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=generator)
    if kind == "model":
        order = torch.randperm(size, generator=generator)
        return (-1.2 * (order + 1.0).log()).clamp(min=-14.0) + 0.3 * normal + 17.0
    if kind == "flat":
        return 1e-3 * normal
    if kind == "coarse":
        row = (normal * 4).round() / 2
        row[torch.rand(size, generator=generator) < 0.2] = -math.inf
        row[seed % size] = 1.0
        return row
    if kind == "all equal":
        return torch.full((size,), -3.25)
    if kind in ("one", "banned"):
        row = torch.full((size,), -math.inf)
        row[seed % size] = -7.0
        if kind == "banned":
            row[seed // 7 % size] = 2.0
            row[seed // 31 % size] = -0.0
        return row
    if kind == "sharp":
        return normal * 40.0
    if kind == "huge":
        return normal * 1e37
    return normal * 1e-40  # denormal numbers


@st.composite
def batches(draw: st.DrawFn, valid: bool = False) -> Tensor:
    """Rows of sizes that fill vectors, blocks and chunks, or do not; some invalid."""
    size = draw(st.sampled_from([1, 2, 7, 16, 33, 255, 256, 300, 4097, 40_000]))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        seed = draw(st.integers(0, 2**31))
        row = row_of(draw(st.sampled_from(KINDS)), size, seed)
        broken = draw(st.sampled_from(["", "", "", "nan", "inf", "nothing"])) if not valid else ""
        if broken == "nothing":
            row = torch.full((size,), -math.inf)
        elif broken:
            row[seed % size] = BROKEN[broken]
        rows.append(row)
    return torch.stack(rows)


SEEDS = st.integers(0, 2**64 - 1)


def keys_of(seed: int, count: int, purpose: Purpose = Purpose.COUPLED) -> tuple[list[tuple[int, int]], Tensor]:
    """Keys of rows, and the same as a tensor."""
    keys = [noise.noise_key(seed, 0, position, purpose) for position in range(count)]
    return keys, noise.key_tensor(keys)


def is_valid(logits: Tensor) -> list[bool]:
    return transforms.valid_rows(logits).tolist()


@st.composite
def filters(draw: st.DrawFn, count: int) -> Filters:
    """The same for each row: what a row is sampled with must not depend on the others."""
    temperature = draw(st.sampled_from([1e-3, 0.01, 0.6, 1.0, 1.7, 30.0, 1e5, 1e9]))
    top_k = draw(st.sampled_from([0, 0, 1, 2, 5, 50, 299, 3_000, 50_000]))
    top_p = draw(st.sampled_from([1.0, 1.0, 1e-12, 0.001, 0.25, 0.5, 0.6181, 0.95, 0.999, 1.0 - 1e-12]))
    return Filters([temperature] * count, [top_k] * count, [top_p] * count)


def supported(logits: Tensor, settings_: Filters) -> transforms.Support:
    """What torch leaves of one row [1, V]."""
    return transforms.filtered(
        logits, temperature=settings_.temperatures[0], top_k=settings_.top_k[0], top_p=settings_.top_p[0]
    )


def first_of(settings_: Filters) -> Filters:
    return Filters(settings_.temperatures[:1], settings_.top_k[:1], settings_.top_p[:1])


def is_usual(row: Tensor, settings_: Filters) -> bool:
    """Whether nothing about a row should be left to torch, but for accidents."""
    largest = float(row[row > -math.inf].abs().max())
    temperature = settings_.temperatures[0]
    return largest / temperature < 1e5 and temperature <= 1e5 and 1e-3 < settings_.top_p[0] <= 1.0


@given(logits=batches())
@EXAMPLES
def test_argmax_is_the_first_of_the_largest(draws: Draws, logits: Tensor) -> None:
    expected = logits.max(dim=-1).indices
    for row, column in enumerate(draws.argmax(logits.unbind())):
        assert column == (int(expected[row]) if is_valid(logits)[row] else -1)


@given(data=st.data(), logits=batches(), seed=SEEDS, first=st.sampled_from([0, 1, 75_968, 2**40]))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_draws_are_those_of_torch(draws: Draws, data: st.DataObject, logits: Tensor, seed: int, first: int) -> None:
    keys, tensor = keys_of(seed, len(logits))
    chosen = data.draw(filters(len(logits)))
    drawn = draws.draw(logits.unbind(), chosen, keys, first)
    for row, column in enumerate(drawn):
        one = logits[row : row + 1]
        assert draws.draw([logits[row]], first_of(chosen), keys[row : row + 1], first) == [column]
        if not is_valid(logits)[row]:
            assert column == -1
            continue
        support = supported(one, chosen)
        moved = transforms.Support(support.token_ids + first, support.scores, False)
        assert column in (-1, int(sampling.draw(moved, tensor[row : row + 1])[0]) - first)
        if is_usual(logits[row], chosen) and chosen.top_p[0] == 1.0:
            assert column >= 0


def test_bounds_of_the_noise_hold_at_its_ends(draws: Draws) -> None:
    """Tokens whose noise is extreme: found by going backwards through the mixing of bits."""
    mask = (1 << 64) - 1

    def unmixed(word: int) -> int:
        word ^= word >> 31 ^ word >> 62
        word = word * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
        word ^= word >> 27 ^ word >> 54
        word = word * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
        return word ^ word >> 30 ^ word >> 60

    tops = [0, 1, 2, 1 << 20, 1 << 51, (1 << 52) - 1, (1 << 52) - 2, (1 << 52) - (1 << 21), (1 << 52) - (1 << 30)]
    for top in tops:
        for column in (0, 3, 15, 299):
            second = 0x1234_5678_9ABC_DEF0
            first = unmixed(unmixed(top << 12) - second & mask) - column * 0x9E3779B97F4A7C15 & mask
            tensor = noise.key_tensor([(first, second)])
            assert float(noise.uniform_rows(tensor, torch.tensor([column]))[0, 0]) == (top + 0.5) * 2.0**-52
            for gap in range(-40, 41, 4):
                logits = torch.randn(1, 301, generator=torch.Generator().manual_seed(column))
                logits[0, column], logits[0, 300] = gap, -math.inf
                expected = sampling.gumbel_argmax(torch.arange(301), logits.double(), tensor).tolist()
                for top_k in (0, 300):
                    settings_ = Filters([1.0], [top_k], [1.0])
                    assert draws.draw(logits.unbind(), settings_, [(first, second)]) == expected


def test_draws_that_rounding_could_turn_are_left_alone(draws: Draws) -> None:
    keys, tensor = keys_of(5, 1)
    gumbel = noise.gumbel_rows(tensor, torch.arange(64))[0]
    best, other = gumbel.argsort(descending=True)[:2].tolist()
    row = torch.full((64,), -30.0)
    row[best], row[other] = 0.0, float(gumbel[best] - gumbel[other])
    row[best] = row[other].double() + gumbel[other] - gumbel[best]  # as near as float32 comes
    gap = float((row.double() + gumbel)[best] - (row.double() + gumbel)[other])
    assert abs(gap) < 1e-6
    (drawn,) = draws.draw([row], Filters.none(1), keys)
    assert drawn == (-1 if abs(gap) < 1e-10 else best if gap > 0 else other)
    # Scores so large that their own rounding decides.
    assert draws.draw([torch.tensor([3e12, 3e12])], Filters.none(1), keys) == [-1]


@given(data=st.data(), logits=batches(valid=True), count=st.sampled_from([1, 2, 5, 50, 64, 299, 3_000, 50_000]))
@EXAMPLES
def test_top_columns_are_the_first_of_the_ranking(
    draws: Draws, data: st.DataObject, logits: Tensor, count: int
) -> None:
    chosen = data.draw(filters(len(logits)))
    columns, sizes = draws.top_columns(logits.unbind(), chosen, count)
    for row, size in enumerate(sizes):
        if size < 0:
            continue
        support = supported(logits[row : row + 1], chosen)
        possible = support.token_ids[0][support.scores[0] > -math.inf]
        if chosen.top_k[0] or chosen.top_p[0] == 1.0:  # tokens at -inf are ranked too, though never drawn
            possible = support.token_ids[0]
        order = logits[row][possible].argsort(descending=True, stable=True)
        expected = possible[order[:count]].sort().values
        found = columns[row, :size]
        likely = logits[row] > -math.inf
        assert torch.equal(found[likely[found]], expected[likely[expected]])
        if chosen.top_k[0] == 0 and chosen.top_p[0] == 1.0:
            assert torch.equal(found, expected)


def test_nuclei_that_rounding_could_turn_are_left_alone(draws: Draws) -> None:
    row = torch.zeros(64)
    row[40:] = -90.0
    shares = [0.3, 0.31, 1e-10, 0.3]  # 12 of 40 are 0.3
    columns, sizes = draws.top_columns([row] * 4, Filters([1.0] * 4, [0, 0, 0, 40], shares), 64)
    assert sizes == [-1, 13, -1, -1]
    assert columns[1, :13].tolist() == list(range(13))
    row = torch.full((64,), -9.0)
    row[7], row[3] = 1e-30, 2e-30  # two logits and one probability
    _, sizes = draws.top_columns([row], Filters([1.0], [0], [0.3]), 64)
    assert sizes == [-1]


@given(data=st.data(), logits=batches(valid=True), seed=SEEDS)
@EXAMPLES
def test_normalisers_and_ranks(draws: Draws, data: st.DataObject, logits: Tensor, seed: int) -> None:
    chosen = data.draw(filters(len(logits)))
    tokens = [seed // (row + 1) % logits.shape[-1] for row in range(len(logits))]
    for row, found in enumerate(zip(*draws.normalisers(logits.unbind(), chosen, tokens), strict=True)):
        normaliser, above, kept = found
        if kept < 0:
            continue
        support = supported(logits[row : row + 1], chosen)
        assert above == int((logits[row] > logits[row, tokens[row]]).sum())
        assert kept >= int((support.scores > -math.inf).sum())
        expected = float(torch.logsumexp(support.scores, dim=-1)[0])
        assert normaliser == pytest.approx(expected, rel=1e-12, abs=1e-10)


@given(
    data=st.data(),
    logits=batches(),
    seed=SEEDS,
    nearness=st.sampled_from([0.0, 1e-9, 0.1, 2.0]),
    top_m=st.sampled_from([1, 3, 64]),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_decisions_are_those_of_torch(
    draws: Draws, data: st.DataObject, logits: Tensor, seed: int, nearness: float, top_m: int
) -> None:
    """Drafts that are the target's, near it, or far from it; filtered as it or not; q rows with padding."""
    chosen = data.draw(filters(len(logits)))
    usable = torch.where(transforms.valid_rows(logits)[:, None], logits, 0.0)
    generator = torch.Generator().manual_seed(seed % 2**63)
    near = usable + nearness * torch.randn(logits.shape, generator=generator)
    draft_ids, probs = transforms.truncate_rows(
        transforms.filtered(near, temperature=chosen.temperatures[0], top_p=chosen.top_p[0]), top_m
    )
    draft_probs = probs.to(torch.float64)
    draft_probs /= draft_probs.sum(dim=-1, keepdim=True)
    own_keys = keys_of(seed, len(logits), Purpose.DRAFT)[1]
    tokens = sampling.gumbel_argmax(draft_ids, draft_probs.log(), own_keys)
    draft_ids = torch.cat([draft_ids, draft_ids[:, :1]], dim=1)
    draft_probs = torch.cat([draft_probs, torch.zeros(len(logits), 1, dtype=torch.float64)], dim=1)
    names = [keys_of(seed, len(logits), purpose) for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL)]
    accepted, own = draws.decide(
        logits.unbind(), chosen, tokens.tolist(), draft_ids, draft_probs, names[0][0], names[1][0]
    )
    for row in range(len(logits)):
        if not is_valid(logits)[row]:
            assert accepted[row] == -1
        elif accepted[row] >= 0:
            part = slice(row, row + 1)
            support = supported(logits[part], chosen)
            expected = rejection.decide(
                support, tokens[part], draft_ids[part], draft_probs[part], names[0][1][part], names[1][1][part]
            )
            assert (accepted[row] == 1, own[row]) == (bool(expected[0][0]), int(expected[1][0]))


def test_most_rows_are_decided(draws: Draws) -> None:
    """On rows like a model's nearly nothing is undecided, accepted or not."""
    logits = torch.stack([row_of("model", 40_000, seed) for seed in range(200)])
    near = logits + 0.5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    draft_ids, probs = transforms.truncate_rows(transforms.filtered(near), 64)
    draft_probs = probs.double() / probs.double().sum(dim=-1, keepdim=True)
    tokens = sampling.gumbel_argmax(draft_ids, draft_probs.log(), keys_of(1, 200, Purpose.DRAFT)[1]).tolist()
    names = [keys_of(1, 200, purpose)[0] for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL)]
    rows = logits.unbind()
    for top_k, top_p in ((0, 1.0), (0, 0.95), (50, 1.0), (50, 0.9)):
        chosen = Filters([1.0] * 200, [top_k] * 200, [top_p] * 200)
        accepted, _ = draws.decide(rows, chosen, tokens, draft_ids, draft_probs, *names)
        assert 20 < accepted.count(0) < 180
        assert accepted.count(-1) <= 2
        keys = keys_of(2, 200)[0]
        drawn = draws.draw(rows, chosen, keys)  # by several threads
        assert drawn.count(-1) <= 1
        alone = Filters([1.0], [top_k], [top_p])
        assert drawn == [draws.draw([row], alone, [key])[0] for row, key in zip(rows, keys, strict=True)]

"""Ranks that hold slices of the vocabulary decide as one rank with all of it, bit for bit."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched.best import BestRows, best_of
from outrider.kernels.reference import vocab_parallel as parallel
from outrider.kernels.reference.errors import InvalidLogitsError
from outrider.kernels.reference.verify import verify_chain

NAME = {"first_position": 17, "seed": 5, "choice": 1}


def split_verdict(
    logits: torch.Tensor, cuts: list[int], tokens: list[int], verifier: str, temperature: float
) -> object:
    bounds = [0, *sorted(cuts), logits.shape[-1]]
    pairs = [
        parallel.local_best(logits[:, start:stop], start, verifier=verifier, temperature=temperature, **NAME)
        for start, stop in itertools.pairwise(bounds)
    ]
    values, best = (torch.stack(part) for part in zip(*pairs, strict=True))
    return parallel.verify_best(values, best, tokens, first_position=NAME["first_position"])


def outcome(call: object) -> object:
    try:
        return call()
    except InvalidLogitsError as error:
        return str(error)


VALUES = st.sampled_from([-math.inf, *(0.5 * i for i in range(-4, 5)), math.nan])


@given(data=st.data(), verifier=st.sampled_from(["greedy", "coupled"]), temperature=st.sampled_from([0.3, 1.0, 2.0]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_slices_decide_as_the_whole(data: st.DataObject, verifier: str, temperature: float) -> None:
    """Ties, bans, NaN rows (needed or not), empty and uneven slices, proposals right and wrong."""
    vocab_size = data.draw(st.integers(1, 20))
    k = data.draw(st.integers(0, 3))
    row = st.lists(VALUES, min_size=vocab_size, max_size=vocab_size)
    logits = torch.tensor(data.draw(st.lists(row, min_size=k + 1, max_size=k + 1)))
    if data.draw(st.booleans()):
        logits = torch.nan_to_num(logits, nan=0.0, neginf=-math.inf)
    cuts = data.draw(st.lists(st.integers(0, vocab_size), max_size=4))
    whole = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "verifier": verifier} | NAME
    tokens: list[int] = []
    for i in range(k):  # mostly right proposals, so that chains go on
        own = outcome(lambda i=i: verify_chain(logits[i : i + 1], [], None, **whole | {"first_position": 17 + i}))
        right = data.draw(st.booleans()) and not isinstance(own, str)
        tokens.append(own.next_token if right else data.draw(st.integers(0, vocab_size - 1)))
    expected = outcome(lambda: verify_chain(logits, tokens, None, **whole))
    assert outcome(lambda: split_verdict(logits, cuts, tokens, verifier, temperature)) == expected


@pytest.mark.parametrize("verifier", ["greedy", "coupled"])
@pytest.mark.parametrize("world_size", [2, 4, 7])
def test_a_full_vocabulary_in_slices(verifier: str, world_size: int) -> None:
    logits = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(world_size))
    logits = (logits * 8).round() / 8  # many ties
    cuts = [len(part) for part in torch.arange(151_936).tensor_split(world_size)]
    cuts = torch.tensor(cuts).cumsum(0)[:-1].tolist()
    whole = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "verifier": verifier} | NAME
    first = verify_chain(logits[:1], [], None, **whole).next_token
    for tokens in ([first], [first + 1]):
        assert split_verdict(logits, cuts, tokens, verifier, 0.8) == verify_chain(logits, tokens, None, **whole)


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("offset", [0, 75_968])
def test_rows_of_many_sequences_are_each_what_local_best_gives(offset: int, is_alone: bool) -> None:
    """On long rows, whose passes may be compiled: bit for bit, and rows without a distribution too."""
    generator = torch.Generator().manual_seed(offset)
    logits = torch.randn(12, 20_000, generator=generator) * 3
    logits[4, 77], logits[5, 3], logits[6] = math.nan, math.inf, -math.inf
    logits[7:9] = 3e12  # ties that rounding decides
    spans, expected, at = [], [], 0
    for number, count in enumerate((1, 3, 3, 2, 1, 2)):
        verifier = Verifier.GREEDY if number in (1, 4) else Verifier.COUPLED
        temperature = 0.0 if verifier is Verifier.GREEDY else 0.5 + number
        sampling = Sampling(temperature=temperature, verifier=verifier, seed=number, choice=number % 2)
        spans.append(BestRows(at, at + count, sampling, 10 * number))
        name = {"first_position": 10 * number, "seed": number, "choice": number % 2, "verifier": verifier.label}
        expected.append(parallel.local_best(logits[at : at + count], offset, temperature=temperature, **name))
        at += count
    values, tokens = best_of(logits, offset, spans, is_alone=is_alone)
    assert values.dtype == torch.float64
    expected_values, expected_tokens = (torch.cat(part) for part in zip(*expected, strict=True))
    usable = expected_values.isfinite()
    assert int(usable.sum()) == 9
    assert torch.equal(tokens[usable], expected_tokens[usable])
    assert torch.equal(parallel.combine_best(values[None], tokens[None]) < 0, ~usable)
    if not is_alone:
        assert torch.equal(values.view(torch.int64), expected_values.view(torch.int64))
        assert torch.equal(tokens, expected_tokens)


def test_where_pairs_suffice() -> None:
    assert parallel.pairs_suffice("greedy", top_k=5, top_p=0.5)
    assert parallel.pairs_suffice("coupled", top_k=0, top_p=1.0)
    assert not parallel.pairs_suffice("coupled", top_k=5, top_p=1.0)
    assert not parallel.pairs_suffice("coupled", top_k=0, top_p=0.9)
    assert not parallel.pairs_suffice("rejection", top_k=0, top_p=1.0)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="'greedy' and 'coupled' only"):
        parallel.local_best(torch.zeros(1, 4), 0, verifier="rejection", temperature=1.0, **NAME)
    with pytest.raises(ValueError, match="2 pairs"):
        parallel.verify_best(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64), [3])

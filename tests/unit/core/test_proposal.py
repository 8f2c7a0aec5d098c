"""Proposals: what is wrong with one, and what of a late one may still be used. Case S9 as far as the wire goes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.prefix import HashedTokens, hash_tokens
from outrider.core.proposal import Proposal, SparseRow, proposal_fault, shorten, sound_part, usable_suffix

VOCAB_SIZE = 10


def row(ids, probs) -> SparseRow:
    return SparseRow(np.array(ids, np.int64), np.array(probs, np.float32))


def proposal(tokens, rows=(), parents=(), base=()) -> Proposal:
    return Proposal(1, len(base), hash_tokens(base), tuple(tokens), tuple(parents), tuple(rows))


def test_good_proposals_have_no_fault() -> None:
    assert proposal_fault(proposal([]), VOCAB_SIZE) is None
    assert proposal_fault(proposal([3, 9]), VOCAB_SIZE) is None
    assert proposal_fault(proposal([3], [row([3, 4], [0.25, 0.75])]), VOCAB_SIZE) is None
    assert proposal_fault(proposal([3, 4, 5], parents=[-1, -1, 0]), VOCAB_SIZE) is None
    assert row([3, 4], [0.25, 0.75]).num_bytes == 16


NAN = float("nan")


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (proposal([10]), "vocabulary"),
        (proposal([-1]), "vocabulary"),
        (proposal([1, 2], parents=[-1]), "parents"),
        (proposal([1, 2], parents=[-1, 1]), "parent"),
        (proposal([1, 2], parents=[-2, 0]), "parent"),
        (proposal([1, 2], [row([1], [1.0])]), "rows"),
        (proposal([1], [row([], [])]), "without entries"),
        (proposal([1], [row([1, 2], [1.0])]), "more ids"),
        (proposal([1], [row([1, 2], [0.5, 0.4])]), "not a distribution"),
        (proposal([1], [row([1, 2], [NAN, 0.5])]), "not a distribution"),
        (proposal([1], [row([1, 2], [float("inf"), 0.5])]), "not a distribution"),
        (proposal([1], [row([1, 2], [0.0, 0.0])]), "not a distribution"),
        (proposal([1], [row([1, 2, 3], [1.0, 0.5, -0.5])]), "not a distribution"),
        (proposal([1], [row([1, 2], [1.0, 0.0])]), "not a distribution"),
        (proposal([1], [row([1, 1], [0.5, 0.5])]), "twice"),
        (proposal([1], [row([1, 10], [0.5, 0.5])]), "outside the vocabulary"),
        (proposal([1], [row([2, 3], [0.5, 0.5])]), "no probability"),
    ],
)
def test_faults_are_told(bad: Proposal, word: str) -> None:
    fault = proposal_fault(bad, VOCAB_SIZE)
    assert fault is not None
    assert word in fault


@pytest.mark.parametrize("broken", [row([2, 3], [NAN, 0.5]), row([2, 3], [0.0, 0.0]), row([2, 10], [0.5, 0.5])])
def test_tokens_drawn_before_a_broken_row_are_kept(broken: SparseRow) -> None:
    """Case S9. What the row holds depends on those tokens, so they must not be dropped because of it."""
    good = row([1, 2], [0.5, 0.5])
    for count in range(1, 4):
        kept = sound_part(proposal([1, 2, 1, 2, 1], [*[good] * count, broken, *[good] * (4 - count)]), VOCAB_SIZE)
        assert kept.tokens == (1, 2, 1, 2)[:count]
        assert len(kept.rows) == count
        assert proposal_fault(kept, VOCAB_SIZE) is None
    from_the_first = proposal([1, 2], [broken, good])
    assert sound_part(from_the_first, VOCAB_SIZE) is from_the_first
    assert proposal_fault(from_the_first, VOCAB_SIZE) is not None
    whole = proposal([1, 2], [good, good])
    assert sound_part(whole, VOCAB_SIZE) is whole
    assert sound_part(proposal([1, 2]), VOCAB_SIZE).tokens == (1, 2)


@pytest.mark.parametrize("ids", [[-1, 1], [1, -5]])
def test_a_negative_token_in_a_row_is_a_fault(ids) -> None:
    assert proposal_fault(proposal([1], [row(ids, [0.5, 0.5])]), VOCAB_SIZE) is not None


TOKENS = st.lists(st.integers(0, 3), max_size=6)


@given(base=TOKENS, since=TOKENS, proposed=TOKENS)
def test_a_late_proposals_rest_is_usable_iff_its_beginning_was_committed(base, since, proposed) -> None:
    rows = [row([token], [1.0]) for token in proposed]
    whole = proposal(proposed, rows, base=base)
    text = HashedTokens(base + since)
    rest = usable_suffix(whole, text)
    if len(since) < len(proposed) and since == proposed[: len(since)]:
        assert rest is not None
        assert (rest.base_len, rest.base_hash) == (len(text), text.hashes[-1])
        assert list(rest.tokens) == proposed[len(since) :]
        assert [int(r.token_ids[0]) for r in rest.rows] == proposed[len(since) :]
        assert rest.proposal_id == whole.proposal_id
    else:
        assert rest is None


def test_another_base_is_never_repaired() -> None:
    text = HashedTokens([1, 2, 3])
    assert usable_suffix(proposal([4], base=[1, 2, 0]), text) is None
    assert usable_suffix(proposal([3, 4], base=[1, 0]), text) is None
    assert usable_suffix(proposal([4], base=[1, 2, 3, 3]), text) is None


def test_a_late_tree_is_not_cut() -> None:
    tree = proposal([3, 4, 5], parents=[-1, -1, 0], base=[1])
    assert usable_suffix(tree, HashedTokens([1])) is tree
    assert usable_suffix(tree, HashedTokens([1, 3])) is None


def test_a_chain_may_spell_out_its_parents() -> None:
    chain = proposal([3, 4, 5], parents=[-1, 0, 1], base=[1])
    assert chain.is_chain
    rest = usable_suffix(chain, HashedTokens([1, 3]))
    assert rest is not None
    assert (rest.tokens, rest.parents) == ((4, 5), ())


def test_shorten_keeps_the_first_tokens_and_their_rows() -> None:
    whole = proposal([1, 2, 3], [row([t], [1.0]) for t in (1, 2, 3)])
    assert shorten(whole, 3) is whole
    assert shorten(whole, 9) is whole
    short = shorten(whole, 1)
    assert (short.tokens, len(short.rows)) == ((1,), 1)
    assert shorten(dataclasses.replace(whole, rows=()), 2).tokens == (1, 2)

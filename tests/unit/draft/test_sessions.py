"""Commits and what they leave of a session's text and cache."""

import random

import numpy as np
import pytest

from outrider.core.prefix import HashedTokens, hash_tokens
from outrider.core.proposal import SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.workers.draft import sessions
from outrider.workers.draft.messages import Address
from outrider.workers.draft.sessions import DraftSession


def row(token: int) -> SparseRow:
    return SparseRow(np.array([token]), np.array([1.0], dtype=np.float32))


def session_with(committed: list[int], drafted: list[int], kv_len: int) -> DraftSession:
    session = DraftSession(Address(1, 1, 1, 1), Sampling(verifier=Verifier.REJECTION), num_tokens=4, opened=1)
    session.text = HashedTokens(committed + drafted)
    session.num_committed = len(committed)
    session.rows = [row(token) for token in drafted]
    session.kv_len = kv_len
    return session


@pytest.mark.parametrize(
    ("base_len", "tokens", "text", "kv_len", "rows"),
    [
        pytest.param(
            3, [10, 11, 12, 13, 20], [1, 2, 3, 10, 11, 12, 13, 20], 6, [], id="all accepted and a bonus token"
        ),
        pytest.param(3, [10, 20], [1, 2, 3, 10, 20], 4, [], id="second rejected"),
        pytest.param(3, [20], [1, 2, 3, 20], 3, [], id="first rejected"),
        pytest.param(3, [10], [1, 2, 3, 10, 11, 12, 13], 6, [11, 12, 13], id="plain step agrees with the draft"),
        pytest.param(3, [10, 11, 12, 13], [1, 2, 3, 10, 11, 12, 13], 6, [], id="agrees with all drafted tokens"),
        pytest.param(3, [], [1, 2, 3, 10, 11, 12, 13], 6, [10, 11, 12, 13], id="nothing new"),
        pytest.param(2, [3, 10, 11], [1, 2, 3, 10, 11, 12, 13], 6, [12, 13], id="base below the committed text"),
        pytest.param(1, [9, 8, 7], [1, 9, 8, 7], 1, [], id="committed text replaced"),
        pytest.param(2, [], [1, 2], 1, [], id="committed text shortened, its last token to be run again"),
        pytest.param(0, [], [], 0, [], id="emptied"),
    ],
)
def test_commit_keeps_what_agrees_and_voids_the_rest(
    base_len: int, tokens: list[int], text: list[int], kv_len: int, rows: list[int]
) -> None:
    session = session_with([1, 2, 3], [10, 11, 12, 13], kv_len=6)
    expected = [1, 2, 3][:base_len] + tokens
    assert sessions.commit(session, base_len, tokens, hash_tokens(expected)) is None
    assert session.text.tokens == text
    assert session.text.hashes == HashedTokens(text).hashes
    assert session.num_committed == len(expected)
    assert session.kv_len == kv_len
    assert [int(one.token_ids[0]) for one in session.rows] == rows


@pytest.mark.parametrize(
    ("base_len", "tokens", "text_hash", "needed_from"),
    [
        pytest.param(5, [1], 0, 3, id="begins beyond the committed text, though within the drafted one"),
        pytest.param(3, [10], 12345, 0, id="another hash"),
    ],
)
def test_commit_that_does_not_fit_changes_nothing(
    base_len: int, tokens: list[int], text_hash: int, needed_from: int
) -> None:
    session = session_with([1, 2, 3], [10, 11], kv_len=4)
    assert sessions.commit(session, base_len, tokens, text_hash) == needed_from
    assert (session.text.tokens, session.num_committed, session.kv_len) == ([1, 2, 3, 10, 11], 3, 4)
    assert len(session.rows) == 2


def test_random_commits_leave_a_cache_of_the_text() -> None:
    """kv_len never covers a position whose tokens up to it differ from those that were run."""
    rng = random.Random(1)
    kept_head_start = 0
    for _ in range(300):
        session = session_with([1, 2, 3], [], kv_len=2)
        run: list[int] = session.text.tokens[:2]  # the tokens whose keys and values the cache holds
        for _ in range(12):
            if rng.random() < 0.6:
                run = [*run[: session.kv_len], *session.text.tokens[session.kv_len :]]
                session.kv_len = len(session.text)
                token = rng.randrange(3)
                sessions.extend(session, [token], [row(token)])
            else:
                base = rng.randint(max(0, session.num_committed - 1), session.num_committed)
                guess = session.text.tokens[base:]
                tokens = guess[: rng.randint(0, len(guess))] + [rng.randrange(3)] * rng.randint(0, 2)
                text = session.text.tokens[:base] + tokens
                assert sessions.commit(session, base, tokens, hash_tokens(text)) is None
                assert session.text.tokens[: session.num_committed] == text
                kept_head_start += session.num_drafted > 0
            assert session.text.tokens[: session.kv_len] == run[: session.kv_len]
            assert sessions.session_fault(session, block_size=4) in (None, _no_blocks(session))
    assert kept_head_start > 50


def _no_blocks(session: DraftSession) -> str:
    return f"keys and values of {session.kv_len} positions in 0 blocks"


def test_missing_rows_and_wanted_tokens() -> None:
    session = session_with([1, 2, 3, 4, 5], [], kv_len=0)
    assert sessions.num_missing(session, capacity=100) == 4  # all but the last, which the next draw runs
    session.proposal_due = True
    assert sessions.num_missing(session, capacity=100) == 5
    assert sessions.num_wanted(session, capacity=100) == 4
    assert sessions.num_wanted(session, capacity=7) == 2
    assert sessions.num_wanted(session, capacity=5) == 0
    session.asked_from = 2
    assert sessions.num_missing(session, capacity=100) == 0

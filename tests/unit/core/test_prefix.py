from __future__ import annotations

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.prefix import EMPTY_HASH, HashedTokens, extend_hash, hash_tokens

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def test_the_hash_is_the_one_that_other_processes_compute() -> None:
    """Pinned: it crosses the wire, so a change of it is a change of the protocol."""
    assert int.from_bytes(b"Outrider", "big") == EMPTY_HASH
    digest = hashlib.blake2b(struct.pack("<QI", EMPTY_HASH, 7), digest_size=8).digest()
    assert extend_hash(EMPTY_HASH, 7) == int.from_bytes(digest, "little")
    assert hash_tokens([]) == EMPTY_HASH


@given(TOKENS, TOKENS)
def test_hashes_chain(head, tail) -> None:
    assert hash_tokens(tail, hash_tokens(head)) == hash_tokens(head + tail)
    assert 0 <= hash_tokens(head) < 2**64


@given(TOKENS, TOKENS)
def test_different_texts_have_different_hashes(one, other) -> None:
    assert (hash_tokens(one) == hash_tokens(other)) == (one == other)


@given(TOKENS, TOKENS, st.data())
def test_hashed_tokens_knows_every_prefix(head, tail, data) -> None:
    text = HashedTokens(head)
    text.extend(tail)
    whole = head + tail
    assert len(text) == len(whole)
    assert text.hashes == [hash_tokens(whole[:n]) for n in range(len(whole) + 1)]
    keep = data.draw(st.integers(0, len(whole)))
    text.truncate(keep)
    assert text.tokens == whole[:keep]
    assert text.hashes[-1] == hash_tokens(whole[:keep])
    text.extend([1, 2])
    assert text.hashes[-1] == hash_tokens([*whole[:keep], 1, 2])

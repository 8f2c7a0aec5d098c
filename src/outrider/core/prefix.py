"""Names for prefixes: a hash chained over the tokens, so that equal hashes at equal lengths mean equal text."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

EMPTY_HASH = 0x4F75747269646572  # the empty prefix


def extend_hash(prefix_hash: int, token: int) -> int:
    """The 64-bit hash of a prefix followed by one token."""
    digest = hashlib.blake2b(struct.pack("<QI", prefix_hash, token), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def hash_tokens(tokens: Iterable[int], prefix_hash: int = EMPTY_HASH) -> int:
    """The hash of ``prefix`` followed by ``tokens``."""
    for token in tokens:
        prefix_hash = extend_hash(prefix_hash, token)
    return prefix_hash


class HashedTokens:
    """A token list that knows the hash of each of its prefixes.

    ``hashes[n]`` is the hash of the first ``n`` tokens.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.hashes: list[int] = [EMPTY_HASH]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.hashes.append(extend_hash(self.hashes[-1], token))

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        del self.tokens[length:]
        del self.hashes[length + 1 :]

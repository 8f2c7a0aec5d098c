"""n-gram lookup: what followed the last time that the text read like its end does now.

A drafter without a model (Saxena, "Prompt Lookup Decoding", 2023; in vLLM the method ``ngram``). It looks at committed
tokens only and is certain of what it says, so its proposals carry no rows: their q is one-hot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.core.prefix import HashedTokens
from outrider.core.proposal import Proposal

DRAFTER = "ngram"
MAX_READ = 4096  # tokens that are entered at once: a step never waits longer for a long prompt
BASE, MODULUS = 0x2545F4914F6CDD1D, (1 << 61) - 1  # of the keys; two n-grams that share one cost a wrong proposal


@dataclass(frozen=True)
class Match:
    """The end of a text occurred before.

    Attributes:
        length: tokens that agree.
        end: where the earlier occurrence ends: the position of the token that followed it.
    """

    length: int
    end: int


class NgramIndex:
    """Where each n-gram of a growing text ended last. A token costs one entry for each length, whatever came before."""

    def __init__(self, shortest: int, longest: int) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens cannot be looked up")
        self.shortest = shortest
        self.longest = longest
        self._num_read = 0
        self._ends: dict[int, int] = {}

    def read(self, tokens: Sequence[int], most: int = MAX_READ) -> bool:
        """Enter what was appended since the last call, ``most`` tokens of it; whether nothing is left.

        The n-grams at the very end are entered when something follows them.
        """
        stop = min(len(tokens) - 1, self._num_read + most)
        for end in range(self._num_read + 1, stop + 1):
            for _, key in self._keys(tokens, end):
                self._ends[key] = end
        self._num_read = max(self._num_read, stop)
        return self._num_read >= len(tokens) - 1

    def match(self, tokens: Sequence[int]) -> Match | None:
        """The longest end of a text that occurred before, where it did so last. The text must be read."""
        best = None
        for length, key in self._keys(tokens, len(tokens)):
            end = self._ends.get(key)
            if end is None:
                break  # what is longer did not occur either
            best = Match(length, end)
        return best

    def _keys(self, tokens: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
        """Length and key of the n-grams that end at a position, the shortest first."""
        key = 0
        for length in range(1, min(self.longest, end) + 1):
            key = (key * BASE + tokens[end - length] + 1) % MODULUS
            if length >= self.shortest:
                yield length, key * (self.longest + 1) + length


def continuation(tokens: Sequence[int], end: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from position ``end`` on; at the end of the text they repeat themselves (as in LZ77)."""
    period = len(tokens) - end
    return tuple(tokens[end + index % period] for index in range(count))


class Lookup:
    """The lookup of one request. It remembers the match of the text that it saw last."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._index = NgramIndex(shortest, longest)
        self._match: Match | None = None
        self._length = 0

    @property
    def longest(self) -> int:
        return self._index.longest

    def match(self, text: HashedTokens) -> Match | None:
        """The longest match of a text that continues the one of the last call. None while a long one is being read."""
        if self._length != len(text) and self._index.read(text.tokens):
            self._match, self._length = self._index.match(text.tokens), len(text)
        return self._match if self._length == len(text) else None

    def proposal(self, text: HashedTokens, count: int) -> Proposal | None:
        """``count`` tokens that continue a text, or None without a match."""
        match = self.match(text)
        if match is None or count <= 0:
            return None
        tokens = continuation(text.tokens, match.end, count)
        return Proposal(0, len(text), text.hashes[-1], tokens, drafter=DRAFTER)

"""A toy drafter whose cache shows every stale entry, and a scheduler's side of a batcher that checks each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from outrider.core.prefix import EMPTY_HASH, extend_hash, hash_tokens
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.workers.draft.batcher import Batcher
from outrider.workers.draft.messages import Address, Close, Commit, Event, EvictionReason, NeedTokens, Open
from outrider.workers.drafters.base import Drafted, DraftRows

VOCAB_SIZE = 7


def toy_token(prefix_hash: int) -> int:
    """The token that the toy model says follows a prefix."""
    return prefix_hash % VOCAB_SIZE


class ToyDrafter:
    """The entry of position t is the hash of the tokens up to t, made from the entry of position t - 1 in the cache.

    So an entry that was computed after a token that is not in the text any more gives other tokens from there on.
    """

    name = "toy"
    fingerprint = "toy"
    vocab_size = VOCAB_SIZE

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.cache: list[int] = [-1] * (num_blocks * block_size)
        self.invalid_positions: set[int] = set()  # of tokens whose row is not finite
        self.batches: list[list[DraftRows]] = []

    def slot(self, block_table: Sequence[int], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, batch: Sequence[DraftRows]) -> list[Drafted]:
        assert 0 < len(batch) <= self.max_num_seqs
        self.batches.append(list(batch))
        results = []
        for rows in batch:
            assert rows.tokens
            assert rows.start + len(rows.tokens) <= self.max_model_len
            entry = EMPTY_HASH if rows.start == 0 else self.cache[self.slot(rows.block_table, rows.start - 1)]
            for offset, token in enumerate(rows.tokens):
                entry = extend_hash(entry, token)
                self.cache[self.slot(rows.block_table, rows.start + offset)] = entry
            results.append(Drafted() if rows.draw is None else self._draw(rows, entry))
        return results

    def _draw(self, rows: DraftRows, entry: int) -> Drafted:
        assert rows.draw is not None
        assert rows.draw.position == rows.start + len(rows.tokens)
        assert rows.draw.prefix_hash == entry
        if rows.draw.position in self.invalid_positions:
            return Drafted(invalid=True)
        token = toy_token(entry)
        if not rows.draw.sampling.needs_draft_probs:
            return Drafted(tokens=(token,))
        # The row carries the position, so that a row that slipped is seen.
        probs = np.array([1 / (2 + rows.draw.position), 1 - 1 / (2 + rows.draw.position)], dtype=np.float32)
        return Drafted(tokens=(token,), rows=(SparseRow(np.array([token, token + VOCAB_SIZE]), probs),))


@dataclass
class Harness:
    """A batcher and the schedulers' side of it."""

    drafter: ToyDrafter
    batcher: Batcher
    events: list[Event] = field(default_factory=list)

    def open(
        self,
        tokens: Sequence[int],
        *,
        session_id: int = 1,
        stream: int = 1,
        epoch: int = 1,
        generation: int = 1,
        num_tokens: int = 4,
        verifier: Verifier = Verifier.COUPLED,
    ) -> Address:
        address = Address(stream, session_id, epoch, generation)
        sampling = Sampling(temperature=0.0 if verifier is Verifier.GREEDY else 1.0, verifier=verifier)
        self.batcher.handle(Open(address, tuple(tokens), len(tokens), hash_tokens(tokens), sampling, num_tokens))
        return address

    def commit(
        self, address: Address, text: Sequence[int], base_len: int, *, num_tokens: int = 4, text_hash: int | None = None
    ) -> None:
        """Tell the draft that ``text`` is committed, of which it shall know the first ``base_len`` tokens."""
        value = hash_tokens(text) if text_hash is None else text_hash
        self.batcher.handle(Commit(address, base_len, tuple(text[base_len:]), value, num_tokens))

    def close(self, address: Address) -> None:
        self.batcher.handle(Close(address))

    def settle(self, max_steps: int = 1000) -> list[Event]:
        """Step until there is nothing to do; the answers since the last call."""
        for _ in range(max_steps):
            if self.batcher.step() == 0:
                assert not self.batcher.has_work
                return self.take()
            self.batcher.check_integrity()
        raise AssertionError(f"still busy after {max_steps} steps")

    def take(self) -> list[Event]:
        self.batcher.check_integrity()
        return self.batcher.take_events()

    def check_caches(self) -> None:
        """Every entry that a session counts as valid is what its text gives."""
        for session in self.batcher.sessions.values():
            for position in range(session.kv_len):
                entry = self.drafter.cache[self.drafter.slot(session.blocks, position)]
                assert entry == session.text.hashes[position + 1]


def bodies(events: Sequence[Event]) -> list[Proposal | EvictionReason | NeedTokens]:
    return [event.body for event in events]


def expected_tokens(prefix: Sequence[int], count: int) -> tuple[int, ...]:
    """What the toy model proposes after a prefix."""
    prefix_hash = hash_tokens(prefix)
    tokens = []
    for _ in range(count):
        tokens.append(toy_token(prefix_hash))
        prefix_hash = extend_hash(prefix_hash, tokens[-1])
    return tuple(tokens)


@pytest.fixture
def make_harness() -> Callable[..., Harness]:
    def make(
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 200,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 16,
        max_num_tokens: int = 8,
        catch_up_rows: int = 6,
    ) -> Harness:
        drafter = ToyDrafter(num_blocks, block_size, max_model_len, max_num_seqs)
        batcher = Batcher(
            drafter,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_tokens=max_num_tokens,
            catch_up_rows=catch_up_rows,
        )
        return Harness(drafter, batcher)

    return make


@pytest.fixture
def expect() -> Callable[[Sequence[int], int], tuple[int, ...]]:
    return expected_tokens

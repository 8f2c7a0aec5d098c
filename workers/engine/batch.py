"""The rows of one forward pass: plain data, and the index buffers made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.workers.engine.attention import SequenceSlots, padded_context
from outrider.workers.engine.kv_cache import slots_of


@dataclass(frozen=True)
class SequenceRows:
    """New tokens of one sequence.

    Attributes:
        tokens: token ids to run, at positions ``start``, ``start + 1``, ...; at least one.
        start: number of positions whose keys and values are valid in the cache; what lies beyond is overwritten or
            ignored, so a shorter ``start`` than before is all that a rollback takes.
        block_table: block ids; position ``t`` lies in block ``block_table[t // block_size]``, at its slot
            ``t % block_size``.
        logits_rows: indices into ``tokens`` of the rows whose hidden states are wanted.
    """

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]
    logits_rows: Sequence[int] = ()


@dataclass(frozen=True)
class Limits:
    """What one forward pass may hold."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_embeddings: int


@dataclass(frozen=True)
class PackedRows:
    """A batch as index tensors: views of the buffers, valid until the next one is packed."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slot_mapping: Tensor  # [rows] int64
    wanted: Tensor  # [num_wanted] int64, indices of rows
    sequences: list[SequenceSlots]


class RowBuffers:
    """Index tensors of fixed size and address, filled anew for each pass."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.limits = limits
        blocks = -(-padded_context(limits.max_model_len) // limits.block_size)
        rows = limits.max_num_batched_tokens
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slot_mapping = torch.zeros(rows, dtype=torch.int64, device=device)
        self._wanted = torch.zeros(rows, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(limits.max_num_seqs, blocks, dtype=torch.int64, device=device)

    def pack(self, batch: Sequence[SequenceRows]) -> PackedRows:
        """Check a batch and lay it out. Raises ``ConfigError`` naming the field and its limit."""
        check_batch(batch, self.limits)
        block_size = self.limits.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for sequence in batch:
            wanted.extend(len(token_ids) + row for row in sequence.logits_rows)
            positions.extend(range(sequence.start, sequence.start + len(sequence.tokens)))
            token_ids.extend(sequence.tokens)
        num_rows = len(token_ids)
        self._token_ids[:num_rows] = torch.tensor(token_ids, dtype=torch.int64)
        self._positions[:num_rows] = torch.tensor(positions, dtype=torch.int64)
        self._wanted[: len(wanted)] = torch.tensor(wanted, dtype=torch.int64)
        sequences = []
        first_row = 0
        for index, sequence in enumerate(batch):
            count = len(sequence.tokens)
            length = sequence.start + count
            # Beyond the sequence's own blocks the table says block 0: a valid place to read, never to look at.
            table = self._block_tables[index]
            used = -(-length // block_size)
            context = padded_context(length)
            needed = -(-context // block_size)
            table[:used] = torch.tensor(list(sequence.block_table[:used]), dtype=torch.int64)
            table[used:needed] = 0
            slots = slots_of(table[:needed], block_size)[:context]
            self._slot_mapping[first_row : first_row + count] = slots[sequence.start : length]
            sequences.append(SequenceSlots(first_row, count, sequence.start, slots))
            first_row += count
        return PackedRows(
            self._token_ids[:num_rows],
            self._positions[:num_rows],
            self._slot_mapping[:num_rows],
            self._wanted[: len(wanted)],
            sequences,
        )


def check_batch(batch: Sequence[SequenceRows], limits: Limits) -> None:
    """Raises ``ConfigError`` naming the field and its limit if a batch does not fit."""
    num_rows = sum(len(sequence.tokens) for sequence in batch)
    if not 0 < len(batch) <= limits.max_num_seqs:
        raise ConfigError(f"a batch of {len(batch)} sequences: max_num_seqs allows 1 to {limits.max_num_seqs}")
    if num_rows > limits.max_num_batched_tokens:
        raise ConfigError(f"a batch of {num_rows} rows: max_num_batched_tokens is {limits.max_num_batched_tokens}")
    for index, sequence in enumerate(batch):
        count = len(sequence.tokens)
        length = sequence.start + count
        used = -(-length // limits.block_size)
        if count == 0 or sequence.start < 0:
            raise ConfigError(f"sequence {index}: {count} tokens from position {sequence.start}: nothing to run")
        if length > limits.max_model_len:
            raise ConfigError(f"sequence {index} has {length} positions: max_model_len is {limits.max_model_len}")
        if used > len(sequence.block_table):
            raise ConfigError(
                f"sequence {index}: block_table has {len(sequence.block_table)} blocks of {limits.block_size}, "
                f"{length} positions need {used}"
            )
        if min(sequence.tokens) < 0 or max(sequence.tokens) >= limits.num_embeddings:
            raise ConfigError(f"sequence {index}: tokens must lie in 0 to {limits.num_embeddings - 1}")
        if min(sequence.block_table[:used]) < 0 or max(sequence.block_table[:used]) >= limits.num_blocks:
            raise ConfigError(f"sequence {index}: block_table must hold ids from 0 to {limits.num_blocks - 1}")
        if any(not 0 <= row < count for row in sequence.logits_rows):
            raise ConfigError(f"sequence {index}: logits_rows must lie in 0 to {count - 1}")

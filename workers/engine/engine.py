"""One model shard and its paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cluster.config import EngineConfig
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.parallel import Parallel


class Engine:
    """A causal language model that runs packed rows over a paged cache; stateless apart from that cache.

    Attributes:
        vocab_size: entries of the tokenizer; ids from there on are padding and have no logits.
        vocab_offset, local_vocab_size: this rank's contiguous slice of the vocabulary.
        fingerprint: of the tokenizer.
        row_invariant: whether a row's result does not depend, by bits, on what runs beside it (measured at start).
    """

    vocab_size: int
    vocab_offset: int
    local_vocab_size: int
    hidden_size: int
    fingerprint: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    row_invariant: bool
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]

    def __init__(self, config: EngineConfig, parallel: Parallel, *, max_num_seqs: int = 64) -> None:
        """Load and shard the model. Raises ``ConfigError`` naming the setting that is wrong."""
        raise NotImplementedError

    def forward(self, batch: Sequence[SequenceRows]) -> Tensor:
        """Run the rows, write their keys and values. Returns wanted hidden rows in order [num_wanted, hidden]."""
        raise NotImplementedError

    def local_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> [n, local_vocab_size] float32: this rank's slice of the vocabulary."""
        raise NotImplementedError

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        """local_logits [n, local_vocab_size] -> [n, vocab_size] float32, the same on every rank."""
        raise NotImplementedError

    def read_kv(self, block_table: Sequence[int], length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the first ``length`` positions, per layer, each [length, local_kv_heads, head_dim]."""
        raise NotImplementedError

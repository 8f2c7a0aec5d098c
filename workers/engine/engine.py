"""One model shard and its paged cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cluster.config import EngineConfig
from outrider.core.end_tokens import end_token_ids
from outrider.core.errors import ConfigError
from outrider.core.fingerprint import read_vocab, vocab_fingerprint, vocab_size
from outrider.kernels.batched.wide import prepare
from outrider.workers.engine.attention import STEP_KEYWORD, AttentionStep
from outrider.workers.engine.batch import Limits, PackedRows, RowBuffers, SequenceRows
from outrider.workers.engine.kv_cache import KVCache, default_num_blocks, free_memory
from outrider.workers.engine.loading import ModelShape, load_model, read_model_config
from outrider.workers.engine.parallel import Parallel
from outrider.workers.engine.products import MIN_ROWS
from outrider.workers.engine.selfcheck import layers_are_row_invariant

logger = logging.getLogger(__name__)

# Tokens of the sequence that the whole-model check of row invariance runs.
PROBE_LENGTH = 9


class Engine:
    """A causal language model that runs packed rows over a paged cache; stateless apart from that cache.

    All ranks of a group call the same methods with the same arguments in the same order.

    Attributes:
        vocab_size: entries of the tokenizer; ids from there on are padding and have no logits.
        vocab_offset, local_vocab_size: this rank's contiguous slice of the vocabulary.
        fingerprint: of the tokenizer.
        end_token_ids: tokens that end a text.
        dtype: what the weights were rounded to, before any quantization.
        row_invariant: whether a row's result does not depend, by bits, on what runs beside it (measured at start).
    """

    def __init__(self, config: EngineConfig, parallel: Parallel) -> None:
        """Load and shard the model. Raises ``ConfigError`` naming the setting that is wrong."""
        self.parallel = parallel
        self.device = _device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        if self.device.type == "cpu":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(config.num_threads or max(1, cores // parallel.local_size))
        shape = read_model_config(config, parallel.world_size)
        vocab = read_vocab(config.model)
        self.fingerprint = vocab_fingerprint(vocab)
        self.vocab_size = vocab_size(vocab)
        if self.vocab_size > shape.num_embeddings:
            raise ConfigError(
                f"model: {config.model} embeds {shape.num_embeddings} tokens, but tokenizer.json has {self.vocab_size}"
            )
        self.end_token_ids = end_token_ids(config.model, vocab)
        self.hidden_size = shape.hidden_size
        self.block_size = config.block_size
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        loaded = load_model(config, self.vocab_size, parallel, self.device)
        self._decoder, self._head, self._format = loaded.decoder, loaded.head, loaded.weight_format
        self._cache_dtype = self._format.activations
        if config.kv_cache_dtype != "auto":
            self._cache_dtype = getattr(torch, config.kv_cache_dtype)
        # oneDNN takes no fewer; padding once is cheaper than in each linear layer.
        self._min_rows = 1 if self._format.kernels is not None else MIN_ROWS
        prepare(self.vocab_size, self.device)
        self.vocab_offset = self._head.vocab_offset
        self.local_vocab_size = self._head.local_vocab_size
        self.num_blocks, self.max_model_len = self._size_cache(config, shape)
        self._cache = KVCache(
            shape.num_layers,
            self.num_blocks,
            self.block_size,
            shape.num_kv_heads // parallel.world_size,
            shape.head_dim,
            self._cache_dtype,
            self.device,
        )
        limits = Limits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_embeddings=shape.num_embeddings,
        )
        self._buffers = RowBuffers(limits, self.device)
        self._check_layers(shape.num_layers)
        self.row_invariant = parallel.smallest(self._measure_row_invariance()) == 1
        logger.info(
            "rank %d serves %s: %d blocks of %d, %d positions, rows %s",
            parallel.rank,
            config.model,
            self.num_blocks,
            self.block_size,
            self.max_model_len,
            "independent of the batch" if self.row_invariant else "dependent on the batch",
        )

    def forward(self, batch: Sequence[SequenceRows]) -> Tensor:
        """Run the rows and write their keys and values.

        Returns the wanted hidden rows in the order of the batch, [num_wanted, hidden]. Positions from a sequence's
        ``start`` on are overwritten; nothing beyond its rows is looked at. Raises ``ConfigError`` for a batch that does
        not fit, before anything is written.
        """
        rows = self._buffers.pack(batch)
        return self._run(rows)[0]

    def local_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> [n, local_vocab_size] float32: this rank's slice of the vocabulary."""
        with torch.no_grad():
            logits: Tensor = self._head(hidden)
        return logits

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        """local_logits [n, local_vocab_size] -> [n, vocab_size] float32, the same on every rank."""
        return self._head.gather(local_logits)

    @property
    def kv_cache_bytes(self) -> int:
        """Memory of this rank's keys and values."""
        return sum(tensor.nbytes for tensor in (*self._cache.keys, *self._cache.values))

    def read_kv(self, block_table: Sequence[int], length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the first ``length`` positions, per layer, each [length, local_kv_heads, head_dim]."""
        return self._cache.read(block_table, length)

    def _run(self, rows: PackedRows) -> tuple[Tensor, AttentionStep]:
        step = AttentionStep(
            self._cache.keys, self._cache.values, rows.slot_mapping, rows.sequences, self.max_model_len
        )
        token_ids, positions = rows.token_ids, rows.positions
        if len(token_ids) < self._min_rows:
            token_ids, positions = token_ids.expand(self._min_rows), positions.expand(self._min_rows)
        with torch.inference_mode():
            output = self._decoder(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                **{STEP_KEYWORD: step},
            )
            hidden: Tensor = output.last_hidden_state[0].index_select(0, rows.wanted)
        return hidden.clone(), step  # a normal tensor, which callers may change

    def _size_cache(self, config: EngineConfig, shape: ModelShape) -> tuple[int, int]:
        """Blocks of the cache and positions of the longest sequence, the same on all ranks."""
        max_model_len = config.max_model_len or shape.max_positions
        local_kv_heads = shape.num_kv_heads // self.parallel.world_size
        elements_per_block = 2 * shape.num_layers * self.block_size * local_kv_heads * shape.head_dim
        num_blocks = config.num_kv_blocks or default_num_blocks(
            self.max_num_seqs,
            max_model_len,
            self.block_size,
            elements_per_block * self._cache_dtype.itemsize,
            free_memory(self.device),
            self.parallel.local_size,
        )
        num_blocks = self.parallel.smallest(num_blocks)
        fits = num_blocks * self.block_size
        if fits < max_model_len and config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but num_kv_blocks {num_blocks} of block_size {self.block_size} "
                f"hold {fits} positions"
            )
        return num_blocks, min(max_model_len, fits)

    def _probe(self, chunks: Sequence[int]) -> Tensor:
        """Hidden states of a short made-up sequence that runs in chunks of the given sizes. [sum(chunks), hidden]"""
        parts = []
        start = 0
        table = list(range(-(-sum(chunks) // self.block_size)))
        for count in chunks:
            tokens = [(7 * position + 1) % self.vocab_size for position in range(start, start + count)]
            parts.append(self.forward([SequenceRows(tokens, start, table, range(count))]))
            start += count
        return torch.cat(parts)

    def _check_layers(self, num_layers: int) -> None:
        rows = self._buffers.pack([SequenceRows([0], 0, [0], [0])])
        _, step = self._run(rows)
        if step.layers_seen != set(range(num_layers)):
            raise ConfigError(
                f"model: only layers {sorted(step.layers_seen)} of {num_layers} use replaceable attention; "
                "the engine needs all of them to"
            )

    def _measure_row_invariance(self) -> int:
        if self.device.type != "cpu":
            return 0  # libraries for accelerators choose a product's algorithm by its shape
        parts = (self._decoder, self._head)
        activations, cache = self._format.activations, self._cache_dtype
        layers = layers_are_row_invariant(parts, self.max_num_batched_tokens, activations, cache, self.device)
        length = min(PROBE_LENGTH, self.max_num_batched_tokens, self.max_model_len)
        together = self._probe([length])
        apart = [self._probe([1] * length), self._probe([2] * (length // 2) + [length % 2] * (length % 2))]
        same = all(torch.equal(together, other) for other in apart)
        return int(layers and same and self.parallel.order_fixed)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device here")
    return torch.device(name)

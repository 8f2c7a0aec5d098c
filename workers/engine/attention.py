"""Attention over a paged cache, registered with transformers as one more attention implementation.

A row's result depends on its own context only: its matrix products have shapes given by its context length rounded up
to ``CONTEXT_TILE``, and one product is made for each row, whatever runs beside it. Masking and softmax work along the
last dimension, so they do not mix rows either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError

IMPLEMENTATION = "outrider_paged"
# The keyword that carries the step from the model's forward to each attention layer.
STEP_KEYWORD = "outrider_step"
CONTEXT_TILE = 64
# Entries of a block of scores, [rows, heads, context]: 16 MiB in float32.
MAX_SCORES = 1 << 22


@dataclass(frozen=True)
class SequenceSlots:
    """One sequence of a step: rows ``first_row`` to ``first_row + num_rows`` of the packed batch."""

    first_row: int
    num_rows: int
    start: int  # position of the first row
    slots: Tensor  # [padded context] int64, slot of each position; any valid slot beyond the last row's position

    @property
    def length(self) -> int:
        """Positions that hold keys and values once the rows are written."""
        return self.start + self.num_rows


@dataclass(frozen=True)
class RowTable:
    """The rows of a step as our attention kernels take them."""

    slots: Tensor  # [total] int64, of each sequence's positions, one sequence after the other
    rows: Tensor  # [num_rows, 4] int64, see ``kernels.cpu.plain.attention``


@dataclass
class AttentionStep:
    """What the attention layers need to know about a step."""

    keys: list[Tensor]  # per layer [num_slots, kv_heads, head_dim]
    values: list[Tensor]  # as keys
    slot_mapping: Tensor  # [num_rows] int64, where each row's key and value go
    sequences: list[SequenceSlots]
    max_context: int  # the longest context that the engine admits, for the check of sliding windows
    layers_seen: set[int] = field(default_factory=set)
    windows_seen: set[int] = field(default_factory=set)  # sliding windows that layers asked for
    # What a layer was given as cosines and sines, and what became of it.
    _rotation: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def num_rows(self) -> int:
        return self.slot_mapping.shape[0]

    @functools.cached_property
    def row_table(self) -> RowTable:
        """Made once for all layers. Each row sees all positions up to its own."""
        rows: list[tuple[int, int, int, int]] = []
        first = 0
        for sequence in self.sequences:
            lengths = range(sequence.start + 1, sequence.length + 1)
            rows.extend((first, length, length, 0) for length in lengths)
            first += len(sequence.slots)
        return RowTable(torch.cat([sequence.slots for sequence in self.sequences]), torch.tensor(rows))

    def rotation(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos, sin, each [1, rows, rotary] -> each [rows, rotary] float32. Made once for layers that get the same."""
        if self._rotation is None or self._rotation[0] is not position_embeddings:
            cos, sin = (part.reshape(self.num_rows, -1).float().contiguous() for part in position_embeddings)
            self._rotation = position_embeddings, (cos, sin)
        return self._rotation[1]

    def check_window(self, sliding_window: int | None) -> None:
        """Raises ``ConfigError`` where a context may outgrow a layer's window, which is not there."""
        if sliding_window is None:
            return
        self.windows_seen.add(sliding_window)
        if sliding_window < self.max_context:
            raise ConfigError(
                f"max_model_len is {self.max_context}, but the model's sliding window allows at most {sliding_window}"
            )


def padded_context(length: int) -> int:
    """A context length rounded up to whole tiles."""
    return -(-length // CONTEXT_TILE) * CONTEXT_TILE


def attend_rows(
    query: Tensor,  # [n, heads, head_dim], rows at positions start, start + 1, ...
    keys: Tensor,  # [padded context of the last row, kv_heads, head_dim]
    values: Tensor,  # as keys; finite wherever no row's context reaches
    start: int,
    scaling: float,
    out: Tensor,  # [n, heads, head_dim], written
) -> None:
    """Causal attention of consecutive rows of one sequence; heads are grouped by the key/value head that they share."""
    num_rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    clean = bool(torch.isfinite(values).all())
    row = 0
    while row < num_rows:
        context = padded_context(start + row + 1)
        last = min(num_rows, context - start, row + max(1, MAX_SCORES // (heads * context)))
        grouped = query[row:last].reshape(last - row, kv_heads, heads // kv_heads, head_dim)
        key_t = keys[:context].permute(1, 2, 0)  # [kv_heads, head_dim, context]
        value = values[:context].transpose(0, 1)  # [kv_heads, context, head_dim]
        scores = torch.stack([torch.bmm(one, key_t) for one in grouped])
        positions = torch.arange(context, device=query.device)
        last_visible = torch.arange(start + row, start + last, device=query.device)
        future = positions[None, :] > last_visible[:, None]  # [n, context]
        scores = (scores * scaling).masked_fill_(future[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        for index in range(last - row):
            # A weight of 0 does not silence a value that is not a number: later rows' values go, where there are such.
            own = value if clean else value.masked_fill(future[index][None, :, None], 0)
            out[row + index] = torch.bmm(weights[index], own).reshape(heads, head_dim)
        row = last


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,  # as key
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call. Returns ([1, rows, heads, head_dim], None).

    Rows beyond the step's own (padding) get zeros and leave no trace in the cache.
    """
    step: AttentionStep | None = kwargs.get(STEP_KEYWORD)
    if step is None:
        raise ConfigError(f"model: {type(module).__name__} does not hand keywords on to its attention")
    if softcap is not None or kwargs.get("s_aux") is not None or attention_mask is not None:
        raise ConfigError(
            f"model: {type(module).__name__} wants soft-capped, sink or masked attention, which is not there"
        )
    step.check_window(sliding_window)
    if key.shape[1:2] + key.shape[3:] != step.keys[0].shape[1:] or value.shape != key.shape:
        raise ConfigError(f"model: {type(module).__name__} shapes its keys and values in a way the cache does not hold")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    step.layers_seen.add(layer)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    num_rows = step.num_rows
    keys, values = step.keys[layer], step.values[layer]
    keys.index_copy_(0, step.slot_mapping, key[0].transpose(0, 1)[:num_rows].to(keys.dtype))
    values.index_copy_(0, step.slot_mapping, value[0].transpose(0, 1)[:num_rows].to(values.dtype))
    rows = query[0].transpose(0, 1)  # [rows, heads, head_dim]
    out = torch.zeros(rows.shape, dtype=query.dtype, device=query.device)
    for sequence in step.sequences:
        chosen = slice(sequence.first_row, sequence.first_row + sequence.num_rows)
        own_keys = keys.index_select(0, sequence.slots).to(query.dtype)
        own_values = values.index_select(0, sequence.slots).to(query.dtype)
        own_values[sequence.length :] = 0  # whatever lies in slots that this sequence has not written
        attend_rows(rows[chosen], own_keys, own_values, sequence.start, scale, out[chosen])
    return out.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Each row's context is known from its position, so the model builds no mask."""


def register_attention() -> None:
    """Make the implementation known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    function: Callable[..., Any] = paged_attention
    AttentionInterface.register(IMPLEMENTATION, function)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)

"""Attention of packed rows over paged keys and values. ``kernels.cpu.plain.attention`` is the definition.

A row's positions are walked through in chunks of a fixed length, each by a program of its own; the chunks are merged
in ascending order (Dao et al., Flash-Decoding, 2023; the running softmax is Milakov, Gimelshein, arXiv 1805.02867). So
a row's result depends on its own context alone.

A table of rows says, as int64 [n, 4]: where the row's sequence starts in ``slots``, how many positions there are up to
its own, the position from which on the last number counts, and that number: bit ``i`` says whether the row sees
position ``i`` from there. A row of length 0 pads a bucket, and its result is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.buffers import CHUNK, AttentionBuffers
from outrider.kernels.triton.common import INTERPRETED, ROW_TILE, product, row_bucket

_BLOCK = 64  # positions of a chunk that are looked at together


def attention(
    buffers: AttentionBuffers,
    num_rows: int,
    max_context: int,
    keys: Tensor,  # [slots, kv_heads, head_dim] float32, bfloat16 or float16
    values: Tensor,  # as keys
    scale: float,
) -> Tensor:
    """Attention of the first ``num_rows`` of ``buffers.query``.

    Args:
        buffers: ``query``, ``slots`` and ``rows`` are read; rows behind ``num_rows`` need length 0, or a table entry
            that fits, up to the next bucket.
        num_rows: 1 to 64.
        max_context: at least the longest row's length; decides the number of programs, not the result. A captured
            graph holds up to this length.
        keys, values: in the type of the queries, or any if the queries are float32. Slots that no row sees may hold
            anything.

    Returns:
        [num_rows, heads * head_dim] in the type of the queries: a view of ``buffers.out``.
    """
    _, heads, head_dim = buffers.query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    if keys.shape != values.shape or keys.shape[2] != head_dim or heads % kv_heads:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit {heads} heads")
    if not keys.is_contiguous() or not values.is_contiguous() or keys.dtype != values.dtype:
        raise ValueError("keys and values must be contiguous and of one type")
    if buffers.query.dtype not in (torch.float32, keys.dtype):
        raise ValueError(f"queries of {buffers.query.dtype} do not go with keys of {keys.dtype}")
    chunks, bucket = triton.cdiv(max_context, CHUNK), row_bucket(num_rows)
    if not 0 < chunks <= buffers.num_chunks:
        raise ValueError(f"a context of {max_context}, but the buffers hold {buffers.num_chunks * CHUNK}")
    shape = {
        "group_tile": max(ROW_TILE, triton.next_power_of_2(group)),
        "dim_tile": max(16, triton.next_power_of_2(head_dim)),
    }
    _chunk_kernel[(bucket, kv_heads, chunks)](
        buffers.query,
        keys,
        values,
        buffers.slots,
        buffers.rows,
        buffers.highest,
        buffers.weight,
        buffers.partial,
        scale,
        kv_heads,
        group,
        head_dim,
        buffers.num_chunks,
        chunk=CHUNK,
        block=_BLOCK,
        interpreted=INTERPRETED,
        **shape,
    )
    _merge_kernel[(bucket, kv_heads)](
        buffers.rows,
        buffers.highest,
        buffers.weight,
        buffers.partial,
        buffers.out,
        kv_heads,
        group,
        head_dim,
        buffers.num_chunks,
        chunk=CHUNK,
        **shape,
    )
    return buffers.out[:num_rows].view(num_rows, -1)


@triton.jit
def _chunk_kernel(
    query: tl.tensor,  # [rows, heads, head_dim]
    keys: tl.tensor,  # [slots, kv_heads, head_dim]
    values: tl.tensor,  # as keys
    slots: tl.tensor,  # [total] int64
    table: tl.tensor,  # [rows, 4] int64
    highest: tl.tensor,  # [rows, heads, chunks] float32, written: the largest score
    weight: tl.tensor,  # [rows, heads, chunks] float32, written: the sum of exp(score - highest)
    partial: tl.tensor,  # [rows, heads, chunks, head_dim] float32, written: the values, so weighted
    scale: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    head_dim: tl.tensor,
    chunks: tl.tensor,
    chunk: tl.constexpr,
    block: tl.constexpr,
    interpreted: tl.constexpr,
    group_tile: tl.constexpr,
    dim_tile: tl.constexpr,
) -> None:
    """The query heads of one row and key/value head, over one chunk of its positions."""
    row, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, length = tl.load(table + row * 4), tl.load(table + row * 4 + 1)
    step_start, visible = tl.load(table + row * 4 + 2), tl.load(table + row * 4 + 3)
    begin = index.to(tl.int64) * chunk
    if begin < length:
        end = tl.minimum(begin + chunk, length)
        member, d = tl.arange(0, group_tile), tl.arange(0, dim_tile)
        head = (row * kv_heads + kv_head) * group + member  # of all rows
        own = (member < group)[:, None] & (d < head_dim)[None, :]
        q = tl.load(query + head.to(tl.int64)[:, None] * head_dim + d[None, :], mask=own, other=0.0)
        top = tl.full([group_tile], float("-inf"), dtype=tl.float32)
        total = tl.zeros([group_tile], dtype=tl.float32)
        mixed = tl.zeros([group_tile, dim_tile], dtype=tl.float32)
        for start in range(begin, end, block):
            t = start + tl.arange(0, block)
            bit = tl.minimum(tl.maximum(t - step_start, 0), 63)
            seen = (t < end) & ((t < step_start) | (((visible >> bit) & 1) == 1))
            slot = tl.load(slots + first + t, mask=seen, other=0)
            place = (slot * kv_heads + kv_head)[:, None] * head_dim + d[None, :]
            there = seen[:, None] & (d < head_dim)[None, :]
            key = tl.load(keys + place, mask=there, other=0.0).to(q.dtype)
            score = product(q, tl.trans(key), interpreted) * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            best = tl.maximum(top, tl.max(score, axis=1))
            base = tl.where(best == float("-inf"), 0.0, best)  # a block of which nothing is seen
            share = tl.exp(score - base[:, None])
            kept = tl.exp(top - base)
            value = tl.load(values + place, mask=there, other=0.0).to(q.dtype)
            mixed = mixed * kept[:, None] + product(share.to(q.dtype), value, interpreted)
            total = total * kept + tl.sum(share, axis=1)
            top = best
        at = head.to(tl.int64) * chunks + index
        tl.store(highest + at, top, mask=member < group)
        tl.store(weight + at, total, mask=member < group)
        tl.store(partial + at[:, None] * head_dim + d[None, :], mixed, mask=own)


@triton.jit
def _merge_kernel(
    table: tl.tensor,
    highest: tl.tensor,
    weight: tl.tensor,
    partial: tl.tensor,
    out: tl.tensor,  # [rows, heads, head_dim], written
    kv_heads: tl.tensor,
    group: tl.tensor,
    head_dim: tl.tensor,
    chunks: tl.tensor,
    chunk: tl.constexpr,
    group_tile: tl.constexpr,
    dim_tile: tl.constexpr,
) -> None:
    """Merges the chunks of one row and key/value head, ascending."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(table + row * 4 + 1)
    member, d = tl.arange(0, group_tile), tl.arange(0, dim_tile)
    head = ((row * kv_heads + kv_head) * group + member).to(tl.int64)
    own = (member < group)[:, None] & (d < head_dim)[None, :]
    top = tl.full([group_tile], float("-inf"), dtype=tl.float32)
    total = tl.zeros([group_tile], dtype=tl.float32)
    mixed = tl.zeros([group_tile, dim_tile], dtype=tl.float32)
    for index in range(0, tl.cdiv(length, chunk)):
        at = head * chunks + index
        other = tl.load(highest + at, mask=member < group, other=float("-inf"))
        best = tl.maximum(top, other)
        base = tl.where(best == float("-inf"), 0.0, best)
        kept, added = tl.exp(top - base), tl.exp(other - base)
        total = total * kept + tl.load(weight + at, mask=member < group, other=0.0) * added
        more = tl.load(partial + at[:, None] * head_dim + d[None, :], mask=own, other=0.0)
        mixed = mixed * kept[:, None] + more * added[:, None]
        top = best
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + head[:, None] * head_dim + d[None, :], mixed, mask=own)

"""Rejection: the acceptance test and the draw from what a rejected proposal leaves; ``reference.rejection`` has the
formulas and their sources, ``verify`` says what scores are."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.reference.rejection import RESIDUAL_MASS_FLOOR
from outrider.kernels.triton.buffers import VOCAB_BLOCK, VerifyBuffers
from outrider.kernels.triton.noise import gumbel, uniforms
from outrider.kernels.triton.scores import best_of_blocks, checked_layout, ids_of, scores_of

_MASS_FLOOR = tl.constexpr(RESIDUAL_MASS_FLOOR)


def decide(buffers: VerifyBuffers, scores: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rejection: accept the proposal, or draw from what it leaves.

    A row without a proposal (-1), with probabilities 0 and a key of ``Purpose.TARGET``, draws from p: a bonus token.

    Args:
        buffers: ``keys`` (of the residual draws), ``accept_keys``, ``temperatures``, ``proposed``, ``draft_ids`` and
            ``draft_probs`` are read.
        scores, token_ids: see above.

    Returns:
        accepted [n] bool, and own [n] int64: the target's token where the proposal was not accepted, else -1. The
        latter is a view of ``buffers.own``.
    """
    layout = checked_layout(buffers, scores, token_ids)
    n, top_m = layout.num_rows, buffers.draft_ids.shape[1]
    _weigh_kernel[(n, layout.blocks)](
        scores,
        buffers.temperatures,
        buffers.highest,
        buffers.weight,
        layout.size,
        layout.stride,
        layout.width,
        block=VOCAB_BLOCK,
    )
    _accept_kernel[(n,)](
        scores,
        buffers.temperatures,
        layout.token_ids,
        buffers.proposed,
        buffers.draft_ids,
        buffers.draft_probs,
        buffers.accept_keys,
        buffers.highest,
        buffers.weight,
        buffers.norms,
        buffers.accepted,
        layout.size,
        layout.stride,
        layout.id_stride,
        layout.width,
        layout.blocks,
        top_m,
        is_sparse=layout.is_sparse,
        block=VOCAB_BLOCK,
        block_tile=layout.block_tile,
        draft_tile=triton.next_power_of_2(top_m),
    )
    _residual_kernel[(n, layout.blocks)](
        scores,
        buffers.temperatures,
        layout.token_ids,
        buffers.draft_ids,
        buffers.draft_probs,
        buffers.keys,
        buffers.norms,
        buffers.accepted,
        buffers.mass,
        buffers.best,
        buffers.best_columns,
        buffers.spare,
        buffers.spare_columns,
        layout.size,
        layout.stride,
        layout.id_stride,
        layout.width,
        top_m,
        is_sparse=layout.is_sparse,
        block=VOCAB_BLOCK,
    )
    _pick_kernel[(n,)](
        layout.token_ids,
        buffers.norms,
        buffers.accepted,
        buffers.mass,
        buffers.best,
        buffers.best_columns,
        buffers.spare,
        buffers.spare_columns,
        buffers.own,
        layout.id_stride,
        layout.width,
        layout.blocks,
        is_sparse=layout.is_sparse,
        block_tile=layout.block_tile,
    )
    return buffers.accepted[:n] != 0, buffers.own[:n]


@triton.jit
def _weigh_kernel(
    scores: tl.tensor,
    temperatures: tl.tensor,
    highest: tl.tensor,
    weight: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
) -> None:
    """One block's part of the softmax's norm."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * block + tl.arange(0, block)
    score = scores_of(scores, temperatures, row, column, column < size, stride)
    top = tl.max(score, axis=0)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    base = tl.where(is_finite, top, 0.0)
    total = tl.sum(tl.where(is_finite, tl.exp(score - base), 0.0), axis=0)
    tl.store(highest + row * width + part, top)
    tl.store(weight + row * width + part, total)


@triton.jit
def _accept_kernel(
    scores: tl.tensor,
    temperatures: tl.tensor,
    token_ids: tl.tensor,
    proposed: tl.tensor,
    draft_ids: tl.tensor,
    draft_probs: tl.tensor,
    accept_keys: tl.tensor,
    highest: tl.tensor,
    weight: tl.tensor,
    norms: tl.tensor,
    accepted: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    id_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    top_m: tl.tensor,
    is_sparse: tl.constexpr,
    block: tl.constexpr,
    block_tile: tl.constexpr,
    draft_tile: tl.constexpr,
) -> None:
    """The row's norm, and u q(x) < p(x)."""
    row = tl.program_id(0)
    part = tl.arange(0, block_tile)
    tops = tl.load(highest + row * width + part, mask=part < blocks, other=float("-inf"))
    top = tl.max(tops, axis=0)
    valid = (top > float("-inf")) & (top < float("inf"))
    base = tl.where(valid, top, 0.0)
    share = tl.load(weight + row * width + part, mask=part < blocks, other=0.0)
    total = tl.sum(tl.where(valid, share * tl.exp(tl.where(tops < float("inf"), tops, 0.0) - base), 0.0), axis=0)
    tl.store(norms + row * 2, top)
    tl.store(norms + row * 2 + 1, total)

    token = tl.load(proposed + row)
    score = float("-inf") + base
    if is_sparse:
        for start in range(0, size, block):
            column = start + tl.arange(0, block)
            inside = column < size
            ids = ids_of(token_ids, row, column, inside, id_stride, is_sparse)
            found = scores_of(scores, temperatures, row, column, inside & (ids == token), stride)
            score = tl.maximum(score, tl.max(found, axis=0))
    else:
        inside = (token >= 0) & (token < size)
        score = scores_of(scores, temperatures, row, token, inside, stride)
    p_token = tl.where(valid, tl.exp(tl.where(valid, score, 0.0) - base) / tl.where(valid, total, 1.0), 0.0)
    entry = tl.arange(0, draft_tile)
    ids = tl.load(draft_ids + row * top_m + entry, mask=entry < top_m, other=-1)
    probs = tl.load(draft_probs + row * top_m + entry, mask=entry < top_m, other=0.0)
    q_token = tl.sum(tl.where(ids == token, probs, 0.0), axis=0)  # one of them at most is positive
    u = uniforms(accept_keys, row, token)
    tl.store(accepted + row, (valid & (token >= 0) & (u * q_token < p_token)).to(tl.int32))


@triton.jit
def _residual_kernel(
    scores: tl.tensor,
    temperatures: tl.tensor,
    token_ids: tl.tensor,
    draft_ids: tl.tensor,
    draft_probs: tl.tensor,
    keys: tl.tensor,
    norms: tl.tensor,
    accepted: tl.tensor,
    mass: tl.tensor,
    best: tl.tensor,
    best_columns: tl.tensor,
    spare: tl.tensor,
    spare_columns: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    id_stride: tl.tensor,
    width: tl.tensor,
    top_m: tl.tensor,
    is_sparse: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One block's part of the residual's mass, and its best for a draw from the residual and for one from p.

    The residual is not divided by its mass: that moves all sums alike, and the best stays the best.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    top, total = tl.load(norms + row * 2), tl.load(norms + row * 2 + 1)
    valid = (top > float("-inf")) & (top < float("inf"))
    if valid & (tl.load(accepted + row) == 0):
        column = part * block + tl.arange(0, block)
        inside = column < size
        score = scores_of(scores, temperatures, row, column, inside, stride)
        ids = ids_of(token_ids, row, column, inside, id_stride, is_sparse)
        p = tl.exp(score - top) / total
        q = tl.zeros([block], dtype=tl.float64)
        for entry in range(0, top_m):
            draft_id, prob = tl.load(draft_ids + row * top_m + entry), tl.load(draft_probs + row * top_m + entry)
            q += tl.where(ids == draft_id, prob, 0.0)
        excess = tl.maximum(p - q, 0.0)
        excess = tl.where(inside, excess, 0.0)
        tl.store(mass + row * width + part, tl.sum(excess, axis=0))
        noise = gumbel(keys, row, ids)
        left = tl.where(excess > 0.0, tl.log(tl.where(excess > 0.0, excess, 1.0)) + noise, float("-inf"))
        value, place = tl.max(left, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best + row * width + part, value)
        tl.store(best_columns + row * width + part, (part * block + place).to(tl.int64))
        value, place = tl.max(score + noise, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(spare + row * width + part, value)
        tl.store(spare_columns + row * width + part, (part * block + place).to(tl.int64))


@triton.jit
def _pick_kernel(
    token_ids: tl.tensor,
    norms: tl.tensor,
    accepted: tl.tensor,
    mass: tl.tensor,
    best: tl.tensor,
    best_columns: tl.tensor,
    spare: tl.tensor,
    spare_columns: tl.tensor,
    own: tl.tensor,
    id_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    is_sparse: tl.constexpr,
    block_tile: tl.constexpr,
) -> None:
    """The token that replaces a rejected proposal: from the residual, or from p where that is too light."""
    row = tl.program_id(0)
    top = tl.load(norms + row * 2)
    wanted = (top > float("-inf")) & (top < float("inf")) & (tl.load(accepted + row) == 0)
    token = tl.full([], -1, dtype=tl.int64)
    if wanted:
        part = tl.arange(0, block_tile)
        total = tl.sum(tl.load(mass + row * width + part, mask=part < blocks, other=0.0), axis=0)
        _, column = best_of_blocks(best, best_columns, row, width, blocks, block_tile)
        _, other = best_of_blocks(spare, spare_columns, row, width, blocks, block_tile)
        column = tl.where(total < _MASS_FLOOR, other, column)
        token = ids_of(token_ids, row, column, wanted, id_stride, is_sparse)
    tl.store(own + row, token)

"""What follows the logits of a step: greedy and keyed draws, and the walk along each chain.

These take the place of ``reference.sampling.draw``, and ``rejection.decide`` beside them that of
``reference.rejection.decide``, on the same plain arrays, behind masks, controls and filters. ``scores`` [n, s] (float64
log-weights up to a constant, or float32 logits, which the row's temperature divides) stand for the tokens ``token_ids``
[n, s] int64, ascending, or for the whole vocabulary.

A vocabulary is cut into blocks of a fixed size; what blocks found is put together in one order. Nothing waits for a
number: verdicts of rows without a distribution (a NaN, +inf, or nothing finite) are -1, as in ``reference.verdict``.

Against the reference: hash and uniforms are equal by bits; so are greedy tokens. Exponentials, logarithms and sums in
float64 may differ in the last bits, so that a draw or an acceptance could differ where two numbers lie closer than
about 1e-12 of each other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.buffers import VOCAB_BLOCK, VerifyBuffers
from outrider.kernels.triton.noise import gumbel
from outrider.kernels.triton.scores import best_of_blocks, checked_layout, ids_of, scores_of


def greedy(buffers: VerifyBuffers, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, the lowest id on a tie.

    Args:
        buffers: ``proposed`` is read.
        logits: [n, V] float32.

    Returns:
        accepted [n] bool: the token is what was proposed; own [n] int64. The latter is a view of ``buffers.own``.
    """
    return _draw(buffers, logits, None, noisy=False)


def draw(buffers: VerifyBuffers, scores: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The Gumbel-argmax of each row, with the noise that its key names: coupled verification, and plain sampling.

    Args:
        buffers: ``keys``, ``temperatures`` and ``proposed`` are read.
        scores, token_ids: see above.

    Returns: as ``greedy``.
    """
    return _draw(buffers, scores, token_ids, noisy=True)


def commit(buffers: VerifyBuffers, num_chains: int, max_rows: int) -> tuple[Tensor, Tensor]:
    """Reads each chain's outcome off its rows, as far as it reaches them.

    Args:
        buffers: ``accepted`` and ``own``, as ``greedy``, ``draw`` or ``decide`` left them, ``first_rows`` and
            ``num_rows`` are read.
        num_chains: chains that count.
        max_rows: at least the rows of the longest chain.

    Returns:
        num_accepted [num_chains] int64, and next_tokens [num_chains] int64; -1 where a row that is needed holds no
        distribution. Views of the buffers.
    """
    _commit_kernel[(num_chains,)](
        buffers.first_rows,
        buffers.num_rows,
        buffers.accepted,
        buffers.own,
        buffers.num_accepted,
        buffers.next_tokens,
        row_tile=triton.next_power_of_2(max_rows),
    )
    return buffers.num_accepted[:num_chains], buffers.next_tokens[:num_chains]


def _draw(buffers: VerifyBuffers, scores: Tensor, token_ids: Tensor | None, noisy: bool) -> tuple[Tensor, Tensor]:
    layout = checked_layout(buffers, scores, token_ids)
    n = layout.num_rows
    _best_kernel[(n, layout.blocks)](
        scores,
        buffers.temperatures,
        layout.token_ids,
        buffers.keys,
        buffers.best,
        buffers.best_columns,
        layout.size,
        layout.stride,
        layout.id_stride,
        layout.width,
        is_noisy=noisy,
        is_sparse=layout.is_sparse,
        block=VOCAB_BLOCK,
    )
    _match_kernel[(n,)](
        layout.token_ids,
        buffers.proposed,
        buffers.best,
        buffers.best_columns,
        buffers.own,
        buffers.accepted,
        layout.id_stride,
        layout.width,
        layout.blocks,
        is_sparse=layout.is_sparse,
        block_tile=layout.block_tile,
    )
    return buffers.accepted[:n] != 0, buffers.own[:n]


@triton.jit
def _best_kernel(
    scores: tl.tensor,
    temperatures: tl.tensor,
    token_ids: tl.tensor,
    keys: tl.tensor,
    best: tl.tensor,
    best_columns: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    id_stride: tl.tensor,
    width: tl.tensor,
    is_noisy: tl.constexpr,
    is_sparse: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The best of one block of one row."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * block + tl.arange(0, block)
    inside = column < size
    score = scores_of(scores, temperatures, row, column, inside, stride)
    if is_noisy:
        score += gumbel(keys, row, ids_of(token_ids, row, column, inside, id_stride, is_sparse))
    value, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * width + part, value)
    tl.store(best_columns + row * width + part, (part * block + place).to(tl.int64))


@triton.jit
def _match_kernel(
    token_ids: tl.tensor,
    proposed: tl.tensor,
    best: tl.tensor,
    best_columns: tl.tensor,
    own: tl.tensor,
    accepted: tl.tensor,
    id_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    is_sparse: tl.constexpr,
    block_tile: tl.constexpr,
) -> None:
    """A row's token, and whether it is the proposed one."""
    row = tl.program_id(0)
    value, column = best_of_blocks(best, best_columns, row, width, blocks, block_tile)
    valid = (value > float("-inf")) & (value < float("inf"))
    token = ids_of(token_ids, row, column, valid, id_stride, is_sparse)
    token = tl.where(valid, token, -1)
    tl.store(own + row, token)
    tl.store(accepted + row, (valid & (token == tl.load(proposed + row))).to(tl.int32))


@triton.jit
def _commit_kernel(
    first_rows: tl.tensor,
    num_rows: tl.tensor,
    accepted: tl.tensor,
    own: tl.tensor,
    num_accepted: tl.tensor,
    next_tokens: tl.tensor,
    row_tile: tl.constexpr,
) -> None:
    """The first row of one chain whose proposal does not stand."""
    chain = tl.program_id(0)
    first, count = tl.load(first_rows + chain), tl.load(num_rows + chain)
    row = tl.arange(0, row_tile)
    stands = tl.load(accepted + first + row, mask=row < count, other=0)
    stop = tl.min(tl.where(stands == 0, row, row_tile), axis=0)
    tl.store(num_accepted + chain, stop.to(tl.int64))
    tl.store(next_tokens + chain, tl.load(own + first + stop, mask=stop < count, other=-1))

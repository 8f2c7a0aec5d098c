"""Drawing a token: the Gumbel-argmax.

With independent standard Gumbel noise g(v), argmax_v (log w(v) + g(v)) is distributed as w normalised (Gumbel 1954;
Maddison, Tarlow, Minka 2014, section 2). Weights need no normalising, zero weights (-inf) are never drawn, and as the
noise is keyed by the
token id, one key gives *coupled* draws from two distributions: they agree as often as the distributions are alike
(Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from torch import Tensor

from outrider.kernels.reference import noise
from outrider.kernels.reference.transforms import Support


def gumbel_argmax(token_ids: Tensor, scores: Tensor, keys: Tensor) -> Tensor:
    """One draw for each row.

    Args:
        token_ids: [s] or [n, s] int64, ascending; the tokens that the columns of ``scores`` stand for.
        scores: [n, s] float64, log-weights up to a constant for each row; -inf is never drawn.
        keys: [n, 2] int64, from ``noise.noise_keys``.

    Returns:
        [n] int64 token ids. Equal sums, which have probability about 2^-52, go to the lowest id.
    """
    return argmax(token_ids, noise.gumbel_rows(keys, token_ids).add_(scores))[1]


def draw(support: Support, keys: Tensor) -> Tensor:
    """``gumbel_argmax`` over a support: [n] int64."""
    return gumbel_argmax(support.token_ids, support.scores, keys)


def argmax(token_ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best score of each row and its token; the lowest id among equals, and NaN wins.

    Returns:
        values [n], tokens [n] int64.
    """
    values, columns = scores.max(dim=-1)  # the first among equals
    if token_ids.dim() == 1:
        return values, token_ids[columns]
    return values, token_ids.gather(1, columns[:, None])[:, 0]

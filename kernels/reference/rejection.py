"""The formulas of rejection sampling: one place for the ratio, the residual, and what counts as a proposal.

``p`` is the target's distribution and ``q`` the one that the proposal was drawn from, both normalised and after every
sampling transformation (Leviathan, Kalman, Matias, arXiv 2211.17192, section 2.3; Chen et al., arXiv 2302.01318,
section on modified rejection sampling).
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.reference import noise, sampling
from outrider.kernels.reference.transforms import Support

# A residual lighter than this is drawn from p instead. A rejection happens with probability equal to the residual's
# mass, so the committed token's distribution moves by less than this bound in total variation. What is lost is
# nothing: in float64, p and q that differ by so little differ by the rounding of the softmax sums (V * 2^-53 is
# 2e-11), not by content.
RESIDUAL_MASS_FLOOR = 1e-9

# How far the float32 probabilities of a q row may sum from 1. They are divided by their sum before use.
ROW_SUM_TOLERANCE = 1e-3


def accepts(u: Tensor, p_token: Tensor, q_token: Tensor) -> Tensor:
    """Accept with probability min(1, p(x) / q(x)): u q(x) < p(x), strictly. All [n] float64 → [n] bool."""
    return u * q_token < p_token


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejection leaves to be drawn from: [p - q]+ normalised (2211.17192, section 2.3; 2302.01318, theorem 1).

    Args:
        p, q: [n, s] float64; p sums to 1 over the s tokens, q to at most 1 (it may have mass where p has none).

    Returns:
        [n, s] float64; p itself where the mass is below ``RESIDUAL_MASS_FLOOR``.
    """
    excess = (p - q).clamp_(min=0.0)
    mass = excess.sum(dim=-1, keepdim=True)
    light = mass[:, 0] < RESIDUAL_MASS_FLOOR
    excess /= mass
    excess[light] = p[light]
    return excess


def decide(
    support: Support,
    tokens: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor,
    accept_keys: Tensor,
    residual_keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept, residual and draw for one proposal in each of n rows. A fused kernel may take this function's place: it
    has the whole of a row's work behind the filters, on plain arrays, and neither state nor a stream of numbers.

    Args:
        support: p, up to a constant for each row.
        tokens: [n] int64, the proposals, inside the vocabulary.
        draft_ids: [n, m] int64, inside the vocabulary, draft_probs: [n, m] float64, summing to 1: q. Entries of
            probability 0 pad shorter rows, and may repeat an id.
        accept_keys, residual_keys: [n, 2] int64, from ``noise.noise_keys``.

    Returns:
        accepted [n] bool, and own [n] int64: the target's token where it was not accepted, else -1.
    """
    target_probs = torch.softmax(support.scores, dim=-1)  # [n, s] float64
    columns, found = support.columns(draft_ids)  # q outside the support of p cancels nothing
    token_column, token_found = support.columns(tokens[:, None])
    p_token = (target_probs.gather(1, token_column) * token_found)[:, 0]
    q_token = (draft_probs * (draft_ids == tokens[:, None])).sum(dim=-1)
    u = noise.uniform_rows(accept_keys, tokens[:, None])[:, 0]
    accepted = accepts(u, p_token, q_token)
    own = torch.full_like(tokens, -1)
    if not bool(accepted.all()):
        lost = ~accepted
        p = target_probs[lost]
        q = torch.zeros_like(p).scatter_add_(1, columns[lost], (draft_probs * found)[lost])
        left = Support(support.rows(lost).token_ids, residual(p, q).log(), support.is_full)
        own[lost] = sampling.draw(left, residual_keys.to(own.device)[lost])
    return accepted, own


def well_formed(tokens: Tensor, token_ids: Tensor, probs: Tensor, vocab_size: int) -> Tensor:
    """Which proposals come with a q row that can have produced them.

    Args:
        tokens: [n] int64, token_ids: [n, m] int64, probs: [n, m] float32.

    Returns: [n] bool: probabilities finite, not negative, summing to 1 within ``ROW_SUM_TOLERANCE``; ids distinct and
        inside the vocabulary; the token's own probability positive.
    """
    if token_ids.shape[-1] == 0:
        return torch.zeros_like(tokens, dtype=torch.bool)
    total = probs.sum(dim=-1, dtype=torch.float64)  # a NaN fails every comparison below
    distribution = (probs.amin(dim=-1) >= 0.0) & ((total - 1.0).abs() <= ROW_SUM_TOLERANCE)
    ordered = token_ids.sort(dim=-1).values
    inside = (ordered[:, 0] >= 0) & (ordered[:, -1] < vocab_size) & (ordered.diff(dim=-1) != 0).all(dim=-1)
    possible = ((token_ids == tokens[:, None]) & (probs > 0.0)).any(dim=-1)
    return distribution & inside & possible

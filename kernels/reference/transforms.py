"""From logits to the distribution that is sampled: temperature, then top-k, then top-p.

The order and the meaning are those of transformers' logits warpers. One thing is settled here that sorting routines
leave
open: tokens are ranked by logit, *equal logits by token id, the lower first*. Greedy takes the first of that ranking,
top-k the first k, top-p the shortest beginning whose mass reaches p. The outcome for a row depends on that row alone.

Filters cost what they keep: a filtered row is handled as its *support*, the tokens that are left, and noise,
normalisation and residuals are computed for those only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.reference.errors import InvalidLogitsError


@dataclass(frozen=True)
class Support:
    """The tokens that each of n rows may still draw, and what speaks for them.

    Attributes:
        token_ids: [n, s] int64, ascending in each row.
        scores: [n, s] float64, log-weights up to a constant for each row; -inf where the row excludes the token.
        is_full: whether each row's ``token_ids`` are the whole vocabulary.
    """

    token_ids: Tensor
    scores: Tensor
    is_full: bool

    def columns(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens [n, m] stand: columns [n, m] int64, arbitrary where not found, and found [n, m] bool."""
        if self.is_full:
            return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
        columns = torch.searchsorted(self.token_ids.contiguous(), token_ids.contiguous())
        columns.clamp_(max=self.token_ids.shape[-1] - 1)
        return columns, self.token_ids.gather(1, columns) == token_ids

    def rows(self, chosen: Tensor) -> Support:
        """The rows where ``chosen`` [n] bool holds; views where that is all of them."""
        if bool(chosen.all()):
            return self
        scores = self.scores[chosen]
        token_ids = self.token_ids[:1].expand(scores.shape) if self.is_full else self.token_ids[chosen]
        return Support(token_ids, scores, self.is_full)


def valid_rows(logits: Tensor) -> Tensor:
    """Which rows hold a distribution: [n, V] → [n] bool. A NaN, a +inf, or no finite entry makes a row invalid."""
    return torch.isfinite(logits.amax(dim=-1))  # amax passes a NaN on


def require_valid_rows(logits: Tensor) -> None:
    """Raise ``InvalidLogitsError`` unless every row of [n, V] holds a distribution."""
    valid = valid_rows(logits)
    if not bool(valid.all()):
        row = int((~valid).nonzero()[0, 0])
        raise InvalidLogitsError(f"row {row} of the logits has a NaN or +inf, or no finite entry")


def filtered(
    logits: Tensor, *, temperature: float | Tensor = 1.0, top_k: int = 0, top_p: float | Tensor = 1.0
) -> Support:
    """Scores after temperature, top-k and top-p, not normalised: enough to draw from by Gumbel-argmax.

    Args:
        logits: [n, V] float32, each row valid.
        temperature: above 0; one for all rows, or [n, 1] float64.
        top_k: keep that many tokens; 0 keeps all.
        top_p: keep the shortest beginning of the ranking whose mass, after top-k, reaches it; in (0, 1].
    """
    if isinstance(temperature, float) and not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}, but sampling needs one above 0")
    if top_k < 0 or (isinstance(top_p, float) and not 0.0 < top_p <= 1.0):
        raise ValueError(f"top_k is {top_k} and top_p {top_p}; they must be at least 0 and in (0, 1]")
    vocab_size = logits.shape[-1]
    if 0 < top_k < vocab_size:
        token_ids = top_columns(logits, top_k)  # [n, top_k]
        support = Support(token_ids, logits.gather(1, token_ids).to(torch.float64) / temperature, is_full=False)
    else:
        everything = torch.arange(vocab_size, device=logits.device).expand(logits.shape)
        support = Support(everything, logits.to(torch.float64) / temperature, is_full=True)
    if isinstance(top_p, float) and top_p == 1.0:
        return support
    kept = nucleus(support.scores, top_p)
    return narrowed(support, kept, int(kept.sum(dim=-1).max()))


def log_probs(logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Log-probabilities after temperature, top-k and top-p.

    Args:
        logits: [n, V] float32.
        temperature: at least 0; 0 puts everything on the first token of the ranking.
        top_k: as in ``filtered``.
        top_p: as in ``filtered``.

    Returns:
        [n, V] float64, normalised; -inf for tokens that are excluded.

    Raises:
        InvalidLogitsError: a row has a NaN or +inf, or no finite entry.
        ValueError: a setting out of its range.
    """
    require_valid_rows(logits)
    if temperature == 0.0:
        token_ids, normalised = (
            logits.max(dim=-1, keepdim=True).indices,
            torch.zeros_like(logits[:, :1], dtype=torch.float64),
        )
    else:
        support = filtered(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        normalised = torch.log_softmax(support.scores, dim=-1)
        if support.is_full:
            return normalised
        token_ids = support.token_ids
    dense = torch.full(logits.shape, -torch.inf, dtype=torch.float64, device=logits.device)
    return dense.scatter_(1, token_ids, normalised)


def truncate_rows(support: Support, top_m: int) -> tuple[Tensor, Tensor]:
    """The ``top_m`` most likely tokens of each row and their probabilities, renormalised over those.

    Returns:
        token_ids [n, m] int64, ascending in each row, and probs [n, m] float32; m is ``top_m`` or the support's size if
        that is less. Entries of probability 0 (tokens outside a row's support, or too unlikely for float32) stay in
        place.
    """
    if top_m < 1:
        raise ValueError(f"top_m is {top_m}, but must be at least 1")
    columns = top_columns(support.scores, top_m)
    probs = torch.softmax(support.scores.gather(1, columns), dim=-1)
    return support.token_ids.gather(1, columns), probs.to(torch.float32)


def truncate(log_probs_row: Tensor, top_m: int) -> tuple[Tensor, Tensor]:
    """The ``top_m`` most likely tokens of one distribution, renormalised: what a draft samples from and sends.

    Args:
        log_probs_row: [V] float64; -inf for excluded tokens.
        top_m: entries to keep; fewer are returned where fewer have a positive probability.

    Returns:
        token_ids [m] int64, ascending, and probs [m] float32, positive, summing to 1 within m * 2^-25.
    """
    everything = torch.arange(len(log_probs_row), device=log_probs_row.device)[None]
    token_ids, probs = truncate_rows(Support(everything, log_probs_row[None], is_full=True), top_m)
    return _positive(token_ids[0], probs[0])


def _positive(token_ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    positive = probs > 0
    return token_ids[positive], probs[positive]


def top_columns(values: Tensor, count: int) -> Tensor:
    """Columns of the first ``count`` of each row's ranking: [n, V] → [n, min(count, V)] int64, ascending."""
    num_columns = values.shape[-1]
    if count >= num_columns:
        return torch.arange(num_columns, device=values.device).expand(values.shape)
    # One more than wanted tells whether the cut falls between equal values, which topk would split as it likes.
    top, columns = values.topk(count + 1, dim=-1)
    columns = columns[:, :count].sort(dim=-1).values
    tied = top[:, count - 1] == top[:, count]  # [n]
    if bool(tied.any()):
        cut = top[tied, count - 1 : count]
        above, equal = values[tied] > cut, values[tied] == cut
        room = count - above.sum(dim=-1, keepdim=True)
        kept = above | (equal & (equal.cumsum(dim=-1) <= room))  # exactly count in each row
        columns[tied] = kept.nonzero()[:, 1].view(-1, count)
    return columns


def nucleus(scores: Tensor, top_p: float | Tensor) -> Tensor:
    """Which tokens top-p keeps: [n, s] float64 → [n, s] bool. top_p: below 1; one for all rows, or [n, 1] float64.

    Only tokens that can matter are sorted: those of probability below (1 - top_p) / s weigh, all together, less than
    1 - top_p, so the nucleus is complete before the first of them. (Half of that, to stay clear of rounding.)
    """
    probs = torch.softmax(scores, dim=-1)  # [n, s]
    candidates = probs >= (1.0 - top_p) / (2 * probs.shape[-1])
    columns = packed_columns(candidates, int(candidates.sum(dim=-1).max()))
    ranked, order = probs.gather(1, columns).sort(dim=-1, descending=True, stable=True)
    mass_before = torch.zeros_like(ranked)
    mass_before[:, 1:] = ranked.cumsum(dim=-1)[:, :-1]
    kept = torch.zeros_like(ranked, dtype=torch.bool).scatter_(1, order, mass_before < top_p)
    return torch.zeros_like(candidates).scatter_(1, columns, kept)


def packed_columns(kept: Tensor, width: int) -> Tensor:
    """The columns that each row keeps, and, where those are fewer than ``width``, the first of the others besides.

    Args:
        kept: [n, s] bool, at most ``width`` in each row.

    Returns:
        [n, min(width, s)] int64, ascending, distinct.
    """
    num_rows, num_columns = kept.shape
    if width >= num_columns:
        return torch.arange(num_columns, device=kept.device).expand(kept.shape)
    head = kept[:, :width]  # holds as many others as are needed
    room = width - kept.sum(dim=-1, keepdim=True)
    filler = ~head & ((~head).cumsum(dim=-1) <= room)
    chosen = kept.clone()
    chosen[:, :width] |= filler
    return chosen.nonzero()[:, 1].view(num_rows, width)


def narrowed(support: Support, kept: Tensor, width: int) -> Support:
    """The support with the tokens that each row keeps, [n, s] bool, at most ``width`` of them, and -inf for the others
    in it."""
    if width >= kept.shape[-1]:
        return Support(support.token_ids, support.scores.masked_fill(~kept, -torch.inf), support.is_full)
    columns = packed_columns(kept, width)
    scores = support.scores.gather(1, columns).masked_fill_(~kept.gather(1, columns), -torch.inf)
    token_ids = columns if support.is_full else support.token_ids.gather(1, columns)
    return Support(token_ids, scores, is_full=False)

"""Verification: which proposals the target keeps, and the token that follows them.

Names, and where they are in the papers. A chain proposes x_1 .. x_k; row i of the target's logits gives p_i, the
target's distribution at the position of x_i after every sampling transformation, and row k + 1 gives the one after
x_k. q_i is the distribution that x_i was really drawn from. ``A`` is the number of accepted tokens; A + 1 tokens are
committed.

- *greedy*: accept while x_i = argmax p_i; the first p_i that disagrees gives the next token.
- *rejection* (Leviathan, Kalman, Matias, arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2):
  accept x_i with probability min(1, p_i(x_i) / q_i(x_i)): if and only if u q_i(x_i) < p_i(x_i), strictly, so that
  nothing of probability 0 is ever accepted. At the first rejection draw from [p_i - q_i]+ normalised; after k
  acceptances draw the bonus token from p_(k+1). Either way each committed token is distributed as p given those
  before it (2211.17192, appendix A.1).
- *coupled* (Daliri, Musco, Suresh, arXiv 2408.07978): the target's own token is argmax_v (log p_i(v) +
  g_i(v)), with Gumbel noise g_i keyed by the position; accept while x_i is that token. The draft used the same noise,
  but whatever it proposed, the committed text is the target's own draws: a function of the seed alone.

Rows are taken in order and only as far as the accepted prefix goes: a row that is not reached is not looked at.

A proposal that cannot be judged (its q row is not a distribution, or gives its token no probability; its token is
outside the vocabulary) counts as absent together with all after it: the target's own draw is used, as if the chain
ended before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.reference import noise, rejection, sampling, transforms
from outrider.kernels.reference.errors import InvalidLogitsError
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.transforms import Support
from outrider.kernels.reference.verdict import Verdict, Verdicts
from outrider.kernels.reference.vocab_parallel import (
    combine_best,
    local_best,
    pairs_suffice,
    verify_best,
    verify_own,
)

__all__ = [
    "InvalidLogitsError",
    "Verdict",
    "Verdicts",
    "combine_best",
    "local_best",
    "pairs_suffice",
    "verify_best",
    "verify_chain",
    "verify_chains",
    "verify_own",
]

VERIFIERS = ("greedy", "rejection", "coupled")


def verify_chain(
    logits: Tensor,
    draft_tokens: Sequence[int],
    draft_rows: Sequence[tuple[Tensor, Tensor]] | None,
    *,
    first_position: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    choice: int,
    verifier: str,
) -> Verdict:
    """Verify one chain; with no proposals, decode one token plainly.

    Args:
        logits: [k + 1, V] float32: row i is the target's logits for the position of ``draft_tokens[i]``, the last row
            those for the position after.
        draft_tokens: the k proposals.
        draft_rows: under "rejection", for each proposal (token_ids [m] int64, probs [m] float32), the distribution that
            it was drawn from; None or empty where each was chosen with certainty (one-hot q). Ignored otherwise.
        first_position: absolute position of ``draft_tokens[0]``, or of the next token if k is 0.
        temperature, top_k, top_p, seed, choice: of the request; the first three are ignored under "greedy".
        verifier: "greedy", "rejection" or "coupled".

    Raises: InvalidLogitsError: a row that is needed has a NaN or +inf, or no finite entry. Rows after the first
        rejection are not needed. ValueError: shapes that do not fit, or a setting out of its range.
    """
    tokens = torch.tensor([list(draft_tokens)], dtype=torch.int64, device=logits.device)
    rows = [_batch_of_one(row, logits.device) for row in draft_rows] if draft_rows else None
    verdicts = verify_chains(
        logits[None],
        tokens,
        rows,
        first_positions=[first_position],
        seeds=[seed],
        choices=[choice],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        verifier=verifier,
    )
    return verdicts.one(0, first_position)


def verify_chains(
    logits: Tensor,
    draft_tokens: Tensor,
    draft_rows: Sequence[tuple[Tensor, Tensor]] | None,
    *,
    first_positions: Sequence[int],
    seeds: Sequence[int],
    choices: Sequence[int],
    temperature: float,
    top_k: int,
    top_p: float,
    verifier: str,
) -> Verdicts:
    """Verify b chains of one length that share their sampling settings. Each outcome depends on its own chain alone.

    Args:
        logits: [b, k + 1, V] float32.
        draft_tokens: [b, k] int64.
        draft_rows: k pairs (token_ids [b, m_i] int64, probs [b, m_i] float32), or None.
        first_positions, seeds, choices: b each.
        temperature, top_k, top_p, verifier: as in ``verify_chain``.

    Raises:
        ValueError: shapes that do not fit, or a setting out of its range. (An invalid row is marked, see ``Verdicts``.)
    """
    num_chains, num_rows, _ = logits.shape
    num_proposals = num_rows - 1
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier is {verifier!r}, but must be one of {', '.join(VERIFIERS)}")
    if tuple(draft_tokens.shape) != (num_chains, num_proposals):
        raise ValueError(f"{num_rows} logits rows fit {num_proposals} proposals, not {tuple(draft_tokens.shape)}")
    if draft_rows and verifier == "rejection" and len(draft_rows) != num_proposals:
        raise ValueError(f"{num_proposals} proposals need as many q rows, not {len(draft_rows)}")
    num_accepted = torch.zeros(num_chains, dtype=torch.int64, device=logits.device)
    next_tokens = torch.full((num_chains,), -1, dtype=torch.int64, device=logits.device)
    going = torch.arange(num_chains, device=logits.device)  # chains whose proposals were all accepted so far

    for i in range(num_rows):
        going = going[transforms.valid_rows(logits[going, i])]
        if len(going) == 0:
            break
        row = _Row(
            logits[going, i],
            positions=[first_positions[chain] + i for chain in going.tolist()],
            seeds=[seeds[chain] for chain in going.tolist()],
            choices=[choices[chain] for chain in going.tolist()],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        tokens = draft_tokens[going, i] if i < num_proposals else None
        if verifier != "rejection":
            own = row.greedy() if verifier == "greedy" else row.draw(Purpose.COUPLED)
            accepted = torch.zeros_like(own, dtype=torch.bool) if tokens is None else own == tokens
        elif tokens is None:
            own = row.draw(Purpose.TARGET)  # the bonus token
            accepted = torch.zeros_like(own, dtype=torch.bool)
        else:
            token_ids, probs = draft_rows[i] if draft_rows else (draft_tokens[:, i : i + 1], None)
            accepted, own = _reject(row, tokens, token_ids[going], None if probs is None else probs[going])
        next_tokens[going[~accepted]] = own[~accepted]
        going = going[accepted]
        num_accepted[going] += 1
    return Verdicts(num_accepted, next_tokens)


class _Row:
    """One row of each of n chains, and what names their random numbers. Filters are applied when first needed."""

    def __init__(
        self,
        logits: Tensor,  # [n, V] float32
        *,
        positions: list[int],
        seeds: list[int],
        choices: list[int],
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> None:
        self.logits = logits
        self._positions, self._seeds, self._choices = positions, seeds, choices
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._support: Support | None = None

    @property
    def support(self) -> Support:
        if self._support is None:
            self._support = transforms.filtered(
                self.logits, temperature=self._temperature, top_k=self._top_k, top_p=self._top_p
            )
        return self._support

    def keys(self, purpose: Purpose) -> Tensor:
        """[n, 2] int64."""
        return noise.noise_keys(self._seeds, self._choices, self._positions, purpose).to(self.logits.device)

    def greedy(self) -> Tensor:
        """[n] int64: the argmax, the lowest id among equals."""
        return self.logits.max(dim=-1).indices

    def draw(self, purpose: Purpose, rows: Tensor | None = None) -> Tensor:
        """Draws from p for all rows, or for the chosen ones: [n] int64."""
        if rows is None:
            return sampling.draw(self.support, self.keys(purpose))
        return sampling.draw(self.support.rows(rows), self.keys(purpose)[rows])


def _reject(row: _Row, tokens: Tensor, token_ids: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rejection rule for one proposal of each of n chains.

    Args:
        tokens: [n] int64, the proposals.
        token_ids: [n, m] int64, probs: [n, m] float32: their q rows; probs None for one-hot.

    Returns:
        accepted [n] bool, and own [n] int64: the target's token where it was not accepted.
    """
    if probs is None:
        probs = torch.ones(token_ids.shape, dtype=torch.float32, device=token_ids.device)
    offered = rejection.well_formed(tokens, token_ids, probs, row.logits.shape[-1])
    accepted = torch.zeros_like(offered)
    own = torch.full_like(tokens, -1)
    if bool(offered.any()):
        draft_probs = probs[offered].to(torch.float64)
        draft_probs /= draft_probs.sum(dim=-1, keepdim=True)
        accepted[offered], own[offered] = rejection.decide(
            row.support.rows(offered),
            tokens[offered],
            token_ids[offered],
            draft_probs,
            row.keys(Purpose.ACCEPT)[offered],
            row.keys(Purpose.RESIDUAL)[offered],
        )
    if not bool(offered.all()):
        own[~offered] = row.draw(Purpose.TARGET, ~offered)
    return accepted, own


def _batch_of_one(row: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    token_ids = torch.as_tensor(row[0], dtype=torch.int64, device=device)
    probs = torch.as_tensor(row[1], dtype=torch.float32, device=device)
    if token_ids.shape != probs.shape:  # not a distribution
        return token_ids.new_empty(1, 0), probs.new_empty(1, 0)
    return token_ids[None], probs[None]

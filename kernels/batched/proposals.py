"""The q rows of proposals under rejection, as one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.reference import rejection


@dataclass(frozen=True)
class Proposal:
    """A proposed token and its q row: token_ids [m] int64, probs [m] float32; None: it was chosen with certainty."""

    token: int
    draft_row: tuple[Tensor, Tensor] | None


def draft_matrix(proposals: Mapping[int, Proposal], vocab_size: int) -> tuple[list[int], Tensor, Tensor]:
    """The q rows of proposals that their q row can have produced.

    Args:
        proposals: by whatever names their rows.

    Returns:
        The names of those proposals, ascending, and their q rows, padded: ids [n, m] int64, probabilities [n, m]
        float64, normalised; on the device that they came on.
    """
    by_size: dict[int, list[tuple[int, int, Tensor, Tensor]]] = {}
    for name, proposal in proposals.items():
        ids, probs = proposal.draft_row or (torch.tensor([proposal.token]), torch.ones(1))
        if ids.shape == probs.shape:
            by_size.setdefault(len(ids), []).append((name, proposal.token, ids.long(), probs.float()))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for same in by_size.values():  # sums over rows of one size: what pads a row must not change its last bits
        ids = torch.stack([row for _, _, row, _ in same])
        probs = torch.stack([row for _, _, _, row in same])
        tokens = torch.tensor([token for _, token, _, _ in same], device=ids.device)
        formed = rejection.well_formed(tokens, ids, probs, vocab_size).tolist()
        weights = probs.to(torch.float64)
        weights /= weights.sum(dim=-1, keepdim=True)
        found |= {name: (ids[row], weights[row]) for row, (name, _, _, _) in enumerate(same) if formed[row]}
    offered = sorted(found)
    if not offered:
        return [], torch.empty(0), torch.empty(0)
    width = max(len(found[name][0]) for name in offered)
    draft_ids = found[offered[0]][0].new_zeros(len(offered), width)
    draft_probs = found[offered[0]][1].new_zeros(len(offered), width)
    for row, name in enumerate(offered):
        ids, probs = found[name]
        draft_ids[row, : len(ids)] = ids
        draft_probs[row, : len(probs)] = probs
    return offered, draft_ids, draft_probs

"""Verification by ranks that each hold a slice of the vocabulary.

Greedy and unfiltered coupled verification are an argmax over tokens: each rank sends the best (value, token) of its
slice for each row, 16 bytes instead of a slice of logits, and everyone who has all pairs knows the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.reference import noise, sampling, transforms
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.verdict import Verdict, checked_verdict


def pairs_suffice(verifier: str, *, top_k: int, top_p: float) -> bool:
    """Whether ranks that hold slices of the vocabulary need only exchange their ``local_best`` for each row.

    True for greedy, and for coupled without top-k and top-p; everything else needs rows gathered.
    """
    return verifier == "greedy" or (verifier == "coupled" and top_k == 0 and top_p == 1.0)


def local_best(
    logits_shard: Tensor,
    vocab_offset: int,
    *,
    first_position: int,
    temperature: float,
    seed: int,
    choice: int,
    verifier: str,
) -> tuple[Tensor, Tensor]:
    """One rank's part of the argmax that decides a row: the best token of its slice of the vocabulary.

    Scores need no normalising and the noise of a token is the same on every rank, so the best of the ranks' bests
    is what one rank with the whole vocabulary would choose, bit for bit.

    Args:
        logits_shard: [n, V_local] float32: n rows of one sequence, tokens ``vocab_offset`` and following.
        first_position: position of the token that row 0 is for.
        verifier: "greedy" or "coupled" (without top-k and top-p; see ``pairs_suffice``).

    Returns:
        values [n] float64 and tokens [n] int64. A slice with a NaN has value NaN; an empty one -inf.
    """
    num_rows, local_size = logits_shard.shape
    if verifier not in ("greedy", "coupled"):
        raise ValueError(f"verifier is {verifier!r}, but pairs suffice for 'greedy' and 'coupled' only")
    token_ids = torch.arange(vocab_offset, vocab_offset + local_size, device=logits_shard.device)
    if local_size == 0:
        values = torch.full((num_rows,), -torch.inf, dtype=torch.float64, device=logits_shard.device)
        return values, torch.full((num_rows,), vocab_offset, dtype=torch.int64, device=logits_shard.device)
    if verifier == "greedy":
        values, tokens = sampling.argmax(token_ids, logits_shard)
        return values.to(torch.float64), tokens
    positions = range(first_position, first_position + num_rows)
    keys = noise.noise_keys([seed] * num_rows, [choice] * num_rows, positions, Purpose.COUPLED)
    scores = transforms.filtered(logits_shard, temperature=temperature).scores
    return sampling.argmax(token_ids, noise.gumbel_rows(keys, token_ids).add_(scores))


def combine_best(values: Tensor, tokens: Tensor) -> Tensor:
    """The best token of each row over all ranks.

    Args:
        values: [world_size, n] float64, tokens: [world_size, n] int64, from ``local_best``.

    Returns:
        [n] int64: the lowest id among equal values; -1 where the row holds no distribution.
    """
    best = values.amax(dim=0)  # passes a NaN on
    lowest = tokens.masked_fill(values != best, torch.iinfo(torch.int64).max).amin(dim=0)
    return lowest.masked_fill_(~torch.isfinite(best), -1)


def verify_best(values: Tensor, tokens: Tensor, draft_tokens: Sequence[int], *, first_position: int = 0) -> Verdict:
    """``verify_chain`` from the ranks' pairs.

    Args:
        values: [world_size, k + 1] float64, tokens: [world_size, k + 1] int64, from ``local_best``.
        draft_tokens: the k proposals.
        first_position: only for the error's text.

    Raises:
        InvalidLogitsError: a row that is needed holds no distribution.
        ValueError: shapes that do not fit.
    """
    if values.shape != tokens.shape or values.shape[-1] != len(draft_tokens) + 1:
        raise ValueError(f"{len(draft_tokens)} proposals need {len(draft_tokens) + 1} pairs, not {tuple(values.shape)}")
    return verify_own(combine_best(values, tokens).tolist(), draft_tokens, first_position=first_position)


def verify_own(own: Sequence[int], draft_tokens: Sequence[int], *, first_position: int = 0) -> Verdict:
    """``verify_best`` from what ``combine_best`` gave for the chain's rows, as numbers.

    Raises:
        InvalidLogitsError: a row that is needed holds no distribution.
        ValueError: shapes that do not fit.
    """
    if len(own) != len(draft_tokens) + 1:
        raise ValueError(f"{len(draft_tokens)} proposals need {len(draft_tokens) + 1} tokens, not {len(own)}")
    num_accepted = 0
    while num_accepted < len(draft_tokens) and own[num_accepted] == draft_tokens[num_accepted] >= 0:
        num_accepted += 1
    return checked_verdict(num_accepted, own[num_accepted], first_position)

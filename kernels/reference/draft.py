"""What a draft does with one row of its logits: propose a token, and say what it was drawn from.

The row that travels is the distribution that was sampled. Under rejection the draft cuts q to its ``top_m`` most
likely tokens, renormalises, rounds to float32, *draws from that* and sends exactly it: the target then divides by the
very numbers behind the draw, and truncation costs a little acceptance but never exactness. A draft that reports its
softmax but proposes its argmax, or draws from the whole softmax and reports the truncated one, bends the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.reference import noise, sampling, transforms
from outrider.kernels.reference.errors import InvalidLogitsError

__all__ = ["Draws", "InvalidLogitsError", "draw", "draw_rows"]


@dataclass(frozen=True)
class Draws:
    """Proposed tokens of n rows, and under rejection what each was drawn from.

    Attributes:
        tokens: [n] int64; -1 where the logits are invalid.
        token_ids: [n, m] int64, ascending in each row, or None: greedy and coupled proposals need no rows.
        probs: [n, m] float32, or None. Zeros pad rows whose support is smaller; they do not travel.
    """

    tokens: Tensor
    token_ids: Tensor | None = None
    probs: Tensor | None = None


def draw(
    logits_row: Tensor,
    position: int,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    choice: int,
    verifier: str,
    prefix_hash: int,
    top_m: int,
) -> tuple[int, Tensor | None, Tensor | None]:
    """Propose the token at ``position``.

    Args:
        logits_row: [V] float32, the draft's next-token logits after the tokens before ``position``.
        position: absolute, of the token being drawn.
        temperature, top_k, top_p: the target's own settings; ignored under "greedy".
        seed, choice: of the request.
        verifier: "greedy" (argmax), "rejection" (a draw of the draft's own, keyed also by ``prefix_hash``) or "coupled"
            (with the noise that the target will use).
        prefix_hash: hash of the tokens before ``position``.
        top_m: entries of the row that is sampled and sent; used under "rejection" only.

    Returns: The token; under "rejection" also token_ids [m] int64, ascending, and probs [m] float32, all positive;
        else None.

    Raises:
        InvalidLogitsError: the row has a NaN or +inf, or no finite entry. The caller proposes nothing from here on.
        ValueError: a setting out of its range.
    """
    draws = draw_rows(
        logits_row[None],
        [position],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=[seed],
        choices=[choice],
        verifier=verifier,
        prefix_hashes=[prefix_hash],
        top_m=top_m,
    )
    token = int(draws.tokens[0])
    if token < 0:
        raise InvalidLogitsError(f"the draft's logits for position {position} have a NaN or +inf, or no finite entry")
    if draws.token_ids is None or draws.probs is None:
        return token, None, None
    positive = draws.probs[0] > 0
    return token, draws.token_ids[0, positive], draws.probs[0, positive]


def draw_rows(
    logits: Tensor,
    positions: Sequence[int],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    seeds: Sequence[int],
    choices: Sequence[int],
    verifier: str,
    prefix_hashes: Sequence[int],
    top_m: int,
) -> Draws:
    """``draw`` for n rows that share their sampling settings; each row's outcome depends on that row alone.

    Args:
        logits: [n, V] float32.
        positions, seeds, choices, prefix_hashes: n each.

    An invalid row is marked (token -1) instead of raising, so that one session does not disturb the others.
    """
    valid = transforms.valid_rows(logits)
    if not bool(valid.all()):  # rows without a distribution are replaced by something harmless, and marked at the end
        logits = torch.where(valid[:, None], logits, torch.zeros((), dtype=logits.dtype, device=logits.device))
    if verifier == "greedy":
        return Draws(logits.max(dim=-1).indices.masked_fill_(~valid, -1))
    support = transforms.filtered(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    if verifier == "coupled":
        keys = noise.noise_keys(seeds, choices, positions, noise.Purpose.COUPLED)
        return Draws(sampling.draw(support, keys).masked_fill_(~valid, -1))
    if verifier == "rejection":
        token_ids, probs = transforms.truncate_rows(support, top_m)
        keys = noise.noise_keys(seeds, choices, positions, noise.Purpose.DRAFT, prefix_hashes)
        tokens = sampling.gumbel_argmax(token_ids, probs.to(torch.float64).log(), keys)
        return Draws(tokens.masked_fill_(~valid, -1), token_ids, probs)
    raise ValueError(f"verifier is {verifier!r}, but must be 'greedy', 'rejection' or 'coupled'")

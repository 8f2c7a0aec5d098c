"""Verification of one chain, row by row, to be read next to the papers. What it says in plain loops is what
``kernels.batched.verify`` does for many chains at once.

Leviathan, Kalman, Matias, arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2; for coupled
Daliri, Musco, Suresh, arXiv 2408.07978. See ``verify`` for the names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.controls import RowText
from outrider.core.logprobs import LogprobsMode, TokenLogprobs
from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched.data import Chain, Outcome
from outrider.kernels.reference import noise, rejection
from outrider.kernels.reference.distribution import distribution, processed_log_probs
from outrider.kernels.reference.errors import InvalidLogitsError, NothingAllowedError
from outrider.kernels.reference.noise import Purpose


def verify_one(chain: Chain) -> Outcome:
    """Which proposals are committed, and the token behind them."""
    sampling, proposal = chain.sampling, list(chain.draft_tokens)
    tokens = [*chain.text[: chain.first_position], *proposal]
    logprobs: list[TokenLogprobs] = []
    for i in range(len(proposal) + 1):
        text = RowText(tokens, chain.first_position + i, sampling.prompt_len)
        allowed = None if chain.allowed is None else chain.allowed[i]
        try:
            target = distribution(chain.logits[i], sampling, text, allowed)
        except (InvalidLogitsError, NothingAllowedError) as error:
            nothing_allowed = isinstance(error, NothingAllowedError)
            return Outcome(error=str(error), is_invalid_logits=True, is_nothing_allowed=nothing_allowed)
        token, accepted = decide(target, chain, i)
        if sampling.logprobs is not None:
            raw = sampling.logprobs_mode is LogprobsMode.RAW
            reported = (
                torch.log_softmax(chain.logits[i].to(torch.float64), dim=-1)
                if raw
                else processed_log_probs(chain.logits[i], sampling, text, allowed)
            )
            logprobs.append(token_logprobs(reported, token, sampling.logprobs))
        if not accepted:
            return Outcome(num_accepted=i, next_token=token, logprobs=tuple(logprobs))
    raise AssertionError("the last row has no proposal to accept")


def decide(target: Tensor, chain: Chain, i: int) -> tuple[int, bool]:
    """The token that row i commits, and whether it is the proposed one. target: [V] float64 log-probabilities."""
    sampling, position = chain.sampling, chain.first_position + i
    proposed = chain.draft_tokens[i] if i < len(chain.draft_tokens) else None
    if sampling.verifier is Verifier.GREEDY:
        own = int(target.argmax())
        return own, own == proposed
    if sampling.verifier is Verifier.COUPLED:
        own = draw_from(target, sampling, position, Purpose.COUPLED)
        return own, own == proposed
    draft = None if proposed is None else draft_probs(chain, i)
    if proposed is None or draft is None:  # the bonus token, or a proposal that counts as absent
        return draw_from(target, sampling, position, Purpose.TARGET), False
    probs = target.exp()
    u = noise.uniform(noise.noise_key(sampling.seed, sampling.choice, position, Purpose.ACCEPT), proposed)
    if u * float(draft[proposed]) < float(probs[proposed]):
        return proposed, True
    left = rejection.residual(probs[None], draft[None])[0]
    return draw_from(left.log(), sampling, position, Purpose.RESIDUAL), False


def draft_probs(chain: Chain, i: int) -> Tensor | None:
    """q of proposal i: [V] float64; None where it cannot have produced the proposed token."""
    token, vocab_size = chain.draft_tokens[i], chain.logits.shape[-1]
    if not 0 <= token < vocab_size:
        return None
    q = torch.zeros(vocab_size, dtype=torch.float64)
    if not chain.draft_rows:
        q[token] = 1.0
        return q
    token_ids, probs = chain.draft_rows[i]
    one = torch.tensor([token])
    if token_ids.shape != probs.shape or not bool(
        rejection.well_formed(one, token_ids[None], probs[None], vocab_size)[0]
    ):
        return None
    q[token_ids] = probs.to(torch.float64)
    return q / q.sum()


def draw_from(log_probs: Tensor, sampling: Sampling, position: int, purpose: Purpose, prefix_hash: int = 0) -> int:
    """The Gumbel-argmax of one distribution [V] float64, the lowest id among equals."""
    key = noise.noise_key(sampling.seed, sampling.choice, position, purpose, prefix_hash)
    return int((log_probs + noise.gumbel(key, torch.arange(len(log_probs)))).argmax())


def token_logprobs(log_probs: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """The entry for one token of a distribution [V] float64."""
    ranking: Sequence[int] = log_probs.argsort(descending=True, stable=True)[:num_top].tolist()
    top = [other for other in ranking if log_probs[other] > -math.inf]
    return TokenLogprobs(
        token_id=token,
        logprob=float(log_probs[token]),
        rank=1 + int((log_probs > log_probs[token]).sum()),
        top_ids=tuple(top),
        top_logprobs=tuple(float(log_probs[other]) for other in top),
    )

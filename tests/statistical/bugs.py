"""Planted bugs: each spoils one step of the loop, or one function of the product, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from outrider.kernels.reference import noise, rejection
from outrider.kernels.reference.noise import Purpose

from .harness import PROMPT_LENGTH, Decoder, Texts

true_keys = noise.noise_keys
true_uniforms = noise.uniform_rows
true_residual = rejection.residual


class Planted(Decoder):
    """A decoder with a bug. ``patches`` replaces functions of the product: (module, name, function)."""

    patches: tuple[tuple[Any, str, Callable], ...] = ()


# What the target draws.


class BonusFromDraft(Planted):
    """The token after a full block is drawn from q."""

    def target_rows(self, going: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
        logits = super().target_rows(going, tokens)
        logits[:, self.k] = self.draft_logits[self.draft_context(going, self.length[going] + self.k)]
        return logits


class ReplacementFromTarget(Planted):
    """A rejected token is replaced by a draw from p instead of the residual."""

    patches = ((rejection, "residual", lambda p, q: p),)


def _unnormalised(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    excess = (p - q).clamp(min=0.0)
    excess[:, -1] += 1.0 - excess.sum(dim=-1)  # where a search along the cumulative sum ends when nothing is found
    return excess


class ResidualNotNormalised(Planted):
    """[p - q]+ is searched with a uniform in (0, 1) as if it summed to 1: the last token gets what is missing."""

    patches = ((rejection, "residual", _unnormalised),)


class ResidualTwice(Planted):
    """The residual is taken against q a second time."""

    patches = ((rejection, "residual", lambda p, q: true_residual(true_residual(p, q), q)),)


class LenientAcceptance(Planted):
    """Proposals are accepted somewhat more often than p / q, for speed."""

    patches = ((rejection, "accepts", lambda u, p, q: u * q < 1.25 * p),)


class TargetWithoutTemperature(Planted):
    """Temperature on one side only: the draft's."""

    def verify(self, *arguments: Any, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
        return super().verify(*arguments, temperature=1.0, **changes)


class DraftReportsWithoutTemperature(Planted):
    """Temperature on one side only: the draft draws with it and reports q without."""

    def draw(self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, tuple]:
        tokens, _ = super().draw(going, position, logits)
        reported = self.draw_rows(going, position, logits, temperature=1.0)
        return tokens, (reported.token_ids, reported.probs)


class TargetWithoutFilters(Planted):
    """top-k and top-p on one side only: the draft's."""

    def verify(self, *arguments: Any, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
        return super().verify(*arguments, top_k=0, top_p=1.0, **changes)


class RowsShifted(Planted):
    """Proposal i is judged by the row of proposal i - 1."""

    def target_rows(self, going: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
        logits = super().target_rows(going, tokens)
        return torch.cat([logits[:, :1], logits[:, :-1]], dim=1)


# What a draft says about its proposals.


class ArgmaxReportedAsSoftmax(Planted):
    """Case S4: the draft proposes its argmax and reports its softmax."""

    def draw(self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, tuple | None]:
        _, row = super().draw(going, position, logits)
        return logits.argmax(dim=-1).numpy(), row


class DrawnBeforeTruncation(Planted):
    """The draft draws from the whole q and reports the truncated, renormalised one. Tokens outside the row count as
    absent, so the text stays exact; acceptance falls."""

    def draw(self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, tuple | None]:
        _, row = super().draw(going, position, logits)
        whole = self.draw_rows(going, position, logits, top_m=self.scenario.vocab_size)
        return whole.tokens.numpy(), row


class RowBentToItsToken(Planted):
    """The draft draws from the whole q and, where the truncated row lacks the token, puts it in the last one's place
    and renormalises."""

    def draw(self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, tuple | None]:
        _, (token_ids, probs) = super().draw(going, position, logits)
        whole = self.draw_rows(going, position, logits, top_m=self.scenario.vocab_size)
        own = whole.probs.gather(1, whole.tokens[:, None])[:, 0]  # as many entries as tokens: ids are columns
        missing = (token_ids != whole.tokens[:, None]).all(dim=-1).nonzero()[:, 0]
        last = probs[missing].argmin(dim=-1)
        token_ids[missing, last] = whole.tokens[missing]
        probs[missing, last] = own[missing]
        return whole.tokens.numpy(), (token_ids, probs / probs.sum(dim=-1, keepdim=True))


# Which proposals are offered.


class UnlikelyWithheld(Planted):
    """A drawn token that looks unlikely to the draft is not offered, nor what follows it."""

    def propose(self, going: np.ndarray) -> tuple[np.ndarray, list]:
        tokens, rows = super().propose(going)
        for i, (token_ids, probs) in enumerate(rows):
            chance = (probs * (token_ids == torch.from_numpy(tokens[:, i : i + 1]))).sum(dim=-1).numpy()
            tokens[chance < 0.2, i:] = -1
        return tokens, rows


class BetterOfTwoDrafters(Planted):
    """Two drafters draw; the token with the higher q is offered, with its own, honest row."""

    def draw(self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, tuple | None]:
        first, row = super().draw(going, position, logits)
        second = self.draw_rows(going, position, logits, prefix_hashes=[7] * len(going)).tokens.numpy()
        probs = torch.softmax(logits.double() / self.scenario.temperature, dim=-1).numpy()
        index = np.arange(len(going))
        return np.where(probs[index, second] > probs[index, first], second, first), row


# What survives a rejection.


class SuffixKept(Planted):
    """Proposals after the rejected one stay in the text, behind its replacement."""

    def commit(self, going: np.ndarray, tokens: np.ndarray, num_accepted: np.ndarray, next_tokens: np.ndarray) -> None:
        length = self.length[going].copy()
        super().commit(going, tokens, num_accepted, next_tokens)
        cut = num_accepted < self.k
        for i in range(self.k):
            suffix = cut & (i > num_accepted)
            self.text[going[suffix], length[suffix] + i] = tokens[suffix, i]
        self.length[going[cut]] = length[cut] + self.k
        for cache in (self.target_cache, self.draft_cache):
            cache[going] = self.text[going]


class TargetCacheStale(Planted):
    """The target's cache keeps the rejected token where its replacement belongs."""

    def roll_back(self, going: np.ndarray, last: np.ndarray) -> None:
        rejected = last < self.length[going] + self.k
        held = self.target_cache[going[rejected], last[rejected]].copy()
        super().roll_back(going, last)
        self.target_cache[going[rejected], last[rejected]] = held


class DraftCacheStale(Planted):
    """The draft's cache keeps the rejected token. The text stays exact; acceptance falls."""

    def roll_back(self, going: np.ndarray, last: np.ndarray) -> None:
        rejected = last < self.length[going] + self.k
        held = self.draft_cache[going[rejected], last[rejected]].copy()
        super().roll_back(going, last)
        self.draft_cache[going[rejected], last[rejected]] = held


class AcceptedAgain(Planted):
    """A round that accepted nothing is run again with other random numbers, as if it had been lost."""

    def verify(self, going: np.ndarray, *arguments: Any, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
        first = super().verify(going, *arguments, **changes)
        again = super().verify(going, *arguments, seeds=(self.seed[going] + 10**9).tolist(), **changes)
        retried = first[0] == 0
        return np.where(retried, again[0], first[0]), np.where(retried, again[1], first[1])


# Random numbers.


class NoiseByOutputIndex(Planted):
    """Noise keyed by the output index: the text is written in turns of two tokens with one seed, and each turn meets
    the noise that wrote the end of its prompt."""

    def noise_positions(self, position: np.ndarray) -> list[int]:
        return ((position - PROMPT_LENGTH) % 2).tolist()


class NoiseWithoutPosition(Planted):
    """One seed, one noise, at every position."""

    patches = ((noise, "noise_keys", lambda s, c, p, purpose, h=None: true_keys(s, c, [7] * len(s), purpose, h)),)


def _one_purpose(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: Purpose, hashes: object = None
) -> torch.Tensor:
    return true_keys(seeds, choices, positions, Purpose.TARGET)


class NoiseWithoutPurpose(Planted):
    """The uniform that accepts a token is the one that made the draft draw it."""

    patches = ((noise, "noise_keys", _one_purpose),)


class RedrawnOnMismatch(Planted):
    """Coupled: where the proposal differs from the target's draw, the target draws afresh."""

    def verify(self, going: np.ndarray, *arguments: Any, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
        num_accepted, next_tokens = super().verify(going, *arguments, **changes)
        logits, tokens = arguments[0], arguments[1]
        afresh = [
            super(RedrawnOnMismatch, self).verify(
                going,
                logits[:, i : i + 1],
                tokens[:, :0],
                [],
                seeds=(self.seed[going] + 10**9).tolist(),
                first_positions=(self.length[going] + i).tolist(),
            )[1]
            for i in range(self.k)
        ]
        for i in range(self.k):
            next_tokens = np.where(num_accepted == i, afresh[i], next_tokens)
        return num_accepted, next_tokens


def _float32_uniforms(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """(top 24 bits + 1/2) * 2^-24 in float32, where the largest rounds to 1."""
    top = (true_uniforms(keys, token_ids) * 2.0**24).floor().to(torch.float32)
    return ((top + 0.5) * 2.0**-24).to(torch.float64)


class Uniforms24Bits(Planted):
    """24-bit uniforms: on a full vocabulary some arbitrary token wins 0.9 % of the draws."""

    patches = ((noise, "uniform_rows", _float32_uniforms),)


# The one seed in 16 million for which a 24-bit uniform for accepting token 0 at position 2 is 0.
ZERO_SEED, ZERO_TOKEN = 4_072_040, 0


class ImpossibleProposal(Planted):
    """No bug: the first text begins with a proposal that the target's filters exclude, chosen with certainty by its
    drafter, under a seed whose uniform for it is below 2^-24. Every other text is as ever."""

    def _run_batch(self, names: np.ndarray) -> Texts:
        self.has_first = 0 in names
        return super()._run_batch(names)

    def propose(self, going: np.ndarray) -> tuple[np.ndarray, list]:
        first = self.has_first and going[0] == 0 and self.length[0] == PROMPT_LENGTH
        if first:
            self.seed[0] = ZERO_SEED
        tokens, rows = super().propose(going)
        if first:
            assert self.scenario.truth.probs[self.scenario.truth.start, ZERO_TOKEN] == 0.0
            tokens[0, 0] = ZERO_TOKEN
            token_ids, probs = rows[0]
            token_ids[0], probs[0] = torch.arange(token_ids.shape[1]), 0.0
            probs[0, ZERO_TOKEN] = 1.0
        return tokens, rows

    def record(self, result: Texts, going: np.ndarray, tokens: np.ndarray, num_accepted: np.ndarray) -> None:
        """That proposal did not come from the draft model, whose acceptance is being counted."""
        if going[0] == 0 and self.length[0] == PROMPT_LENGTH:
            going, tokens, num_accepted = going[1:], tokens[1:], num_accepted[1:]
        super().record(result, going, tokens, num_accepted)


class AcceptsWhenEqual(ImpossibleProposal):
    """``u q <= p`` with 24-bit uniforms from [0, 1): 0 <= 0 accepts a token that the target cannot produce."""

    patches = (
        (rejection, "accepts", lambda u, p, q: u * q <= p),
        (noise, "uniform_rows", lambda keys, ids: (true_uniforms(keys, ids) * 2.0**24).floor() * 2.0**-24),
    )

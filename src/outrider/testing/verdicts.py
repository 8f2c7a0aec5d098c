"""What a ``ToyModel`` commits under a request's settings.

Plain requests need no more than the model. Controls, grammars and log-probabilities are the real ones, applied to the
model's logits at temperature 0; they need torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.controls import gather_needed
from outrider.core.logprobs import TokenLogprobs
from outrider.core.prefix import HashedTokens
from outrider.core.sampling import Sampling, Verifier
from outrider.grammar import Matcher
from outrider.testing.toy import ToyModel


@dataclass(frozen=True)
class ToyVerdict:
    """Fields as in ``SequenceResult``; ``error`` in words."""

    committed: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_forced_tokens: int = 0
    num_forced_accepted: int = 0
    error: str | None = None

    @property
    def num_accepted(self) -> int:
        return len(self.committed) - 1


def decide(
    model: ToyModel, text: HashedTokens, proposal: Sequence[int], sampling: Sampling, matcher: Matcher | None = None
) -> ToyVerdict:
    """What a round commits after a text, which stays as it is. ``matcher``: of the sampling's grammar, if any."""
    if not gather_needed(sampling):
        length, committed = len(text), list[int]()
        for proposed in (*proposal, None):
            committed.append(model.next_token(text.hashes[-1], len(text), sampling.choice))
            if committed[-1] != proposed:
                break
            text.extend(committed[-1:])
        text.truncate(length)
        return ToyVerdict(tuple(committed))

    import torch

    from outrider.kernels.batched.data import Chain
    from outrider.kernels.batched.verify import verify

    tokens = text.tokens
    allowed = None if matcher is None else matcher.allowed(tokens[sampling.prompt_len :], proposal)
    chain = Chain(
        logits=torch.tensor(_rows(model, [*tokens, *proposal], len(tokens), sampling.choice)),
        sampling=replace(sampling, temperature=0.0, verifier=Verifier.GREEDY),
        first_position=len(tokens),
        draft_tokens=tuple(proposal),
        text=tuple(tokens),
        allowed=None if allowed is None else torch.from_numpy(allowed),
    )
    (outcome,) = verify([chain])
    if outcome.error is not None:
        return ToyVerdict(error=outcome.error)
    forced = [] if allowed is None else [bool(row.sum() == 1) for row in allowed[: len(proposal)]]
    return ToyVerdict(
        committed=(*proposal[: outcome.num_accepted], outcome.next_token),
        logprobs=outcome.logprobs,
        num_forced_tokens=sum(forced),
        num_forced_accepted=sum(forced[: outcome.num_accepted]),
    )


def score(
    model: ToyModel, tokens: Sequence[int], scored: Sequence[int], num_top: int, choice: int = 0
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the scored tokens, of which the last follows ``tokens``."""
    import torch

    from outrider.kernels.batched.logprobs import score as score_rows

    rows = _rows(model, tokens, len(tokens) - len(scored) + 1, choice)
    return tuple(score_rows(torch.tensor(rows), scored, num_top))


def _rows(model: ToyModel, tokens: Sequence[int], first: int, choice: int) -> list[list[float]]:
    """Logits after each prefix of ``first`` tokens or more."""
    text = HashedTokens(tokens)
    return [model.logits(text.hashes[length], length, choice) for length in range(first, len(tokens) + 1)]

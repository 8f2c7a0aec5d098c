"""What a request gave: text, tokens, what speculation did, and how long it took as the client saw it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.quantiles import nearest_rank


@dataclass(frozen=True)
class TopLogprob:
    """One of the most likely tokens in a place."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token.

    Attributes:
        token: as text; bytes that are no character of their own are shown as U+FFFD.
        logprob: None for the first token of a prompt, which nothing comes before; -inf for a token that is excluded.
        rank: 1 for the most likely token; None where ``logprob`` is None.
        top: the most likely tokens in its place, most likely first; as many as were asked for.
    """

    token_id: int
    token: str
    logprob: float | None
    rank: int | None
    top: tuple[TopLogprob, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON, which knows no -inf: ``logprob`` is None there too, and ``rank`` is a number."""
        return {
            "token_id": self.token_id,
            "token": self.token,
            "logprob": _finite(self.logprob),
            "rank": self.rank,
            "top": [
                {"token_id": top.token_id, "token": top.token, "logprob": _finite(top.logprob)} for top in self.top
            ],
        }


@dataclass(frozen=True)
class Delta:
    """A piece of the output. ``text`` is final; it may be empty while a character or a stop string is incomplete.

    Attributes:
        choice: index of the choice that it belongs to.
        logprobs: one for each of ``token_ids``, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt and of the output.

    Attributes:
        cached_prompt_tokens: those of the prompt that the server's prefix cache held, so that they were not computed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(frozen=True)
class Speculation:
    """What speculation did.

    Attributes:
        verifier: "greedy", "rejection" or "coupled".
        drafter: what proposed, such as "model"; empty if nothing did.
        num_spec_steps: rounds that had a proposal.
        acceptance_histogram: entry ``i`` counts rounds with a proposal that accepted exactly ``i`` tokens.
        target_calls: target passes that committed tokens.
        probability_bytes: bytes of draft probabilities that reached the target.
        num_forced_tokens: proposed tokens in whose place the grammar left no choice.
        num_forced_accepted: those of them that were accepted.
        grammar_ms: time that the grammar took at the target.
    """

    verifier: str
    drafter: str
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    target_calls: int
    probability_bytes: int
    num_forced_tokens: int = 0
    num_forced_accepted: int = 0
    grammar_ms: float = 0.0

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted tokens for each proposed one; None without proposals."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def free_acceptance_rate(self) -> float | None:
        """The same of the proposed tokens in whose place the grammar left a choice; None without such."""
        proposed = self.num_draft_tokens - self.num_forced_tokens
        return (self.num_accepted_tokens - self.num_forced_accepted) / proposed if proposed else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round with a proposal committed, the target's own included; None without proposals."""
        return 1 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON; rates that do not exist are None."""
        return {
            "verifier": self.verifier,
            "drafter": self.drafter,
            "num_spec_steps": self.num_spec_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_histogram": list(self.acceptance_histogram),
            "target_calls": self.target_calls,
            "num_forced_tokens": self.num_forced_tokens,
            "num_forced_accepted": self.num_forced_accepted,
            "free_acceptance_rate": self.free_acceptance_rate,
            "grammar_ms": round(self.grammar_ms, 3),
        }


@dataclass(frozen=True)
class Timing:
    """Milliseconds, measured by the client.

    Attributes:
        ttft_ms: from the call to the first tokens; None if there were none.
        itl_p50_ms: median gap between messages; None with fewer than two of them.
        itl_p99_ms: 99th percentile of the same.
        total_ms: from the call to the end.
    """

    ttft_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    total_ms: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON; times that do not exist are None."""
        return {
            "ttft_ms": self.ttft_ms,
            "itl_ms": {"p50": self.itl_p50_ms, "p99": self.itl_p99_ms},
            "total_ms": self.total_ms,
        }


@dataclass(frozen=True)
class Choice:
    """One text that a request gave.

    Attributes:
        finish_reason: "stop", "length" or "abort".
        matched_stop: the stop string, or the text of the stop token, that ended the text.
        reproducible: whether the seed gives the same text again.
        logprobs: one for each of ``token_ids``; None unless they were asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: str | None
    usage: Usage
    reproducible: bool
    speculation: Speculation
    timing: Timing
    logprobs: tuple[TokenLogprob, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "matched_stop": self.matched_stop,
            "usage": _usage_dict(self.usage),
            "reproducible": self.reproducible,
            "speculation": self.speculation.to_dict(),
            "timing": self.timing.to_dict(),
            "logprobs": _logprobs_list(self.logprobs),
        }


@dataclass(frozen=True)
class Completion:
    """The whole answer to a request.

    The parts of the first choice are at hand as parts of the completion too (``text``, ``token_ids``, ...).

    Attributes:
        seed: gives the same text again where ``reproducible``.
        usage: tokens of the prompt, and of the output of all choices.
        choices: as many as were asked for, by their index.
        prompt_text: the prompt as text; None unless ``echo`` was asked for.
        prompt_logprobs: one for each token of the prompt; None unless they were asked for.
    """

    request_id: str
    seed: int
    usage: Usage
    choices: tuple[Choice, ...]
    prompt_text: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def matched_stop(self) -> str | None:
        return self.choices[0].matched_stop

    @property
    def reproducible(self) -> bool:
        return self.choices[0].reproducible

    @property
    def speculation(self) -> Speculation:
        return self.choices[0].speculation

    @property
    def timing(self) -> Timing:
        return self.choices[0].timing

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    def to_dict(self) -> dict[str, Any]:
        """The object that ``outrider generate --json`` prints.

        With one choice its parts stand beside ``request_id``; with several, ``choices`` is a list of objects. Rates
        and times that do not exist are None. ``prompt`` is there where it was asked for.
        """
        shared = {"request_id": self.request_id, "seed": self.seed, "usage": _usage_dict(self.usage)}
        if self.prompt_text is not None:
            shared["prompt"] = self.prompt_text
        shared["prompt_logprobs"] = _logprobs_list(self.prompt_logprobs)
        if len(self.choices) > 1:
            return {**shared, "choices": [choice.to_dict() for choice in self.choices]}
        parts = self.choices[0].to_dict()
        del parts["index"]
        return {"request_id": self.request_id, **parts, **shared}


def timing_from(started: float, arrivals: Sequence[float], ended: float) -> Timing:
    """``arrivals`` are the times, in seconds, at which messages with tokens came."""
    gaps = sorted(1000 * (after - before) for before, after in itertools.pairwise(arrivals))
    return Timing(
        ttft_ms=_rounded(1000 * (arrivals[0] - started) if arrivals else None),
        itl_p50_ms=_rounded(nearest_rank(gaps, 0.5) if gaps else None),
        itl_p99_ms=_rounded(nearest_rank(gaps, 0.99) if gaps else None),
        total_ms=round(1000 * (ended - started), 3),
    )


def _usage_dict(usage: Usage) -> dict[str, Any]:
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}


def _logprobs_list(logprobs: Sequence[TokenLogprob] | None) -> list[dict[str, Any]] | None:
    return None if logprobs is None else [entry.to_dict() for entry in logprobs]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

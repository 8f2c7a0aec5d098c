"""What a request gave: text, tokens, what speculation did, and how long it took as the client saw it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.sampling import Verifier
from outrider.v1 import generation_pb2, group_pb2

FINISH_REASONS = {
    group_pb2.FINISH_REASON_STOP: "stop",
    group_pb2.FINISH_REASON_LENGTH: "length",
    group_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True)
class Delta:
    """A piece of the output. ``text`` is final; it may be empty while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt and of the output."""

    prompt_tokens: int
    completion_tokens: int


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
    """

    verifier: str
    drafter: str
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    target_calls: int
    probability_bytes: int

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted tokens for each proposed one; None without proposals."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round with a proposal committed, the target's own included; None without proposals."""
        return 1 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else None


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


@dataclass(frozen=True)
class Completion:
    """The whole answer to a request.

    Attributes:
        finish_reason: "stop", "length" or "abort".
        matched_stop: the stop string, or the text of the stop token, that ended the text.
        seed: gives the same text again where ``reproducible``.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: str | None
    usage: Usage
    seed: int
    reproducible: bool
    speculation: Speculation
    timing: Timing

    def to_dict(self) -> dict[str, Any]:
        """The object that ``outrider generate --json`` prints. Rates and times that do not exist are None."""
        spec, timing = self.speculation, self.timing
        return {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "matched_stop": self.matched_stop,
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
            },
            "seed": self.seed,
            "reproducible": self.reproducible,
            "speculation": {
                "verifier": spec.verifier,
                "drafter": spec.drafter,
                "num_spec_steps": spec.num_spec_steps,
                "num_draft_tokens": spec.num_draft_tokens,
                "num_accepted_tokens": spec.num_accepted_tokens,
                "draft_acceptance_rate": spec.draft_acceptance_rate,
                "mean_acceptance_length": spec.mean_acceptance_length,
                "acceptance_histogram": list(spec.acceptance_histogram),
                "target_calls": spec.target_calls,
            },
            "timing": {
                "ttft_ms": timing.ttft_ms,
                "itl_ms": {"p50": timing.itl_p50_ms, "p99": timing.itl_p99_ms},
                "total_ms": timing.total_ms,
            },
        }


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest value that is not below ``fraction`` of all of them (nearest rank); None of no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def timing_from(started: float, arrivals: Sequence[float], ended: float) -> Timing:
    """``arrivals`` are the times, in seconds, at which messages with tokens came."""
    gaps = [1000 * (after - before) for before, after in itertools.pairwise(arrivals)]
    return Timing(
        ttft_ms=_rounded(1000 * (arrivals[0] - started) if arrivals else None),
        itl_p50_ms=_rounded(percentile(gaps, 0.5)),
        itl_p99_ms=_rounded(percentile(gaps, 0.99)),
        total_ms=round(1000 * (ended - started), 3),
    )


def completion_from(
    request_id: str,
    started: generation_pb2.Started,
    finished: generation_pb2.Finished,
    deltas: Sequence[Delta],
    timing: Timing,
) -> Completion:
    """Put together what the messages of a stream said."""
    finish, stats = finished.finish, finished.finish.speculation
    return Completion(
        request_id=request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=FINISH_REASONS.get(finish.reason, "abort"),
        matched_stop=finish.matched_stop or None,
        usage=Usage(finished.prompt_tokens, finished.completion_tokens),
        seed=started.seed,
        reproducible=finish.reproducible,
        speculation=Speculation(
            verifier=Verifier(stats.verifier or started.verifier).label,
            drafter=stats.drafter,
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            acceptance_histogram=tuple(stats.acceptance_histogram),
            target_calls=stats.target_calls,
            probability_bytes=stats.probability_bytes,
        ),
        timing=timing,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

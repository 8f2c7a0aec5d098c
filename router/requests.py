"""What a scheduler is asked, what it answers, and what it knows about one request.

Positions are absolute in prompt + output, counted from 0; times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outrider.core.logprobs import TokenLogprobs
from outrider.core.prefix import HashedTokens
from outrider.core.proposal import Proposal
from outrider.core.sampling import Sampling, Verifier
from outrider.router.goodput import Level, num_allowed

if TYPE_CHECKING:
    from outrider.router.draft_session import DraftSession
    from outrider.router.families import Family
    from outrider.router.lookup import Lookup
    from outrider.router.policy import Throttle


class FinishReason(enum.IntEnum):
    """Why a request ended; the numbers are those of the protocol."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    DEADLINE = 5


@dataclass(frozen=True)
class NewRequest:
    """A request as the scheduler takes it, every default filled in.

    Attributes:
        generation: grows each time ``request_id`` is used again.
        max_tokens: output tokens wanted; None takes as many as context and cache hold.
        eos_token_ids: tokens at which the model ends its text; empty where it is not to end there.
        stop_token_ids: further tokens that end the text.
        stop: strings that end the text; matching them is the cutter's affair.
        min_tokens: stop strings that are complete within so many output tokens do not count. What keeps EOS and stop
            tokens away from there is the control of that name, at the target.
        num_choices: choices to generate; the scheduler numbers them in ``sampling.choice``.
        num_speculative_tokens: None takes the scheduler's setting; 0 means no speculation.
        deadline: time at which the request is given up, or None.
        traceparent: the request's span, that those of its rounds belong to; empty where it is not traced.
    """

    request_id: str
    generation: int
    prompt_tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    num_choices: int = 1
    num_speculative_tokens: int | None = None
    deadline: float | None = None
    traceparent: str = ""


class Cutter(Protocol):
    """Finds stop strings in the output of one request, across the borders of tokens and rounds."""

    def feed(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Take in committed output tokens.

        Returns how many of ``tokens`` belong to the text and the stop string that was found, or None. The last token
        kept is the one that completes the match. After a match the cutter is fed no more. EOS and stop tokens are not
        fed: they carry no text.
        """
        ...


class NoStops:
    """The cutter of a request without stop strings."""

    def feed(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        return len(tokens), None


@dataclass(frozen=True)
class RoundFacts:
    """What a round did for one choice.

    Attributes:
        base_len: length of the text before it.
        drafter: what kind of drafter its proposal came from; empty without one.
        goes_on: whether another round follows.
    """

    epoch: int
    base_len: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    drafter: str
    goes_on: bool


class RequestTrace(Protocol):
    """Told what happens to one choice of a traced request."""

    @property
    def traceparent(self) -> str:
        """The span of the round under way; empty before the first."""
        ...

    def planned(self, *, ahead: bool = False) -> str:
        """A step will run rows of it. Returns the span of the round that they belong to.

        ``ahead``: that round follows the one under way.
        """
        ...

    def decided(self) -> None:
        """The outcome of a round is here."""
        ...

    def committed(self, facts: RoundFacts) -> None:
        """It became permanent."""
        ...

    def ended(self, reason: FinishReason, error_message: str) -> None: ...


@dataclass(frozen=True)
class SpeculationStats:
    """What speculation did for one request. Nothing behind the end of its text is counted.

    Attributes:
        drafter: which kind of drafter made the proposals; empty if there were none. Of several, all that were heard:
            ``model+ngram``.
        num_spec_steps: rounds that had a proposal.
        num_draft_tokens: proposed tokens that were verified.
        num_accepted_tokens: those of them that became text.
        acceptance_histogram: entry ``i`` counts rounds with a proposal that accepted exactly ``i`` tokens.
        target_calls: target passes that committed tokens.
        probability_bytes: bytes of q rows that went to the target.
        num_forced_tokens: proposed tokens in whose place the grammar left no choice.
        num_forced_accepted: those of them that became text.
        grammar_ms: time that the grammar took at the target.
    """

    verifier: Verifier
    drafter: str = ""
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    target_calls: int = 0
    probability_bytes: int = 0
    num_forced_tokens: int = 0
    num_forced_accepted: int = 0
    grammar_ms: float = 0.0


@dataclass(frozen=True)
class Finished:
    """How a request ended.

    Attributes:
        matched_stop: the stop string that ended the text, or None.
        stop_token: the EOS or stop token that ended the text (it is the last token), or None.
        reproducible: whether the same request gives the same text again.
        cached_prompt_tokens: tokens of the prompt that were found in the prefix cache when the request began.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationStats
    matched_stop: str | None = None
    stop_token: int | None = None
    error_message: str = ""
    reproducible: bool = False
    cached_prompt_tokens: int = 0


@dataclass(frozen=True)
class Committed:
    """Tokens of one choice that became permanent, and its end if they are the last ones.

    Attributes:
        position: position of ``tokens[0]``; the length of the text where ``tokens`` is empty.
        proposal_id: the draft worker's proposal that was verified, or 0.
        num_accepted: how many of ``tokens`` a proposal contributed.
        choice: which of the request's choices this is.
        logprobs: one for each of ``tokens``, where they are asked for.
        prompt_logprobs: with the first tokens of choice 0, where they are asked for: one for each token of the prompt
            but the first.
    """

    request_id: str
    generation: int
    position: int
    tokens: tuple[int, ...]
    finish: Finished | None = None
    proposal_id: int = 0
    num_accepted: int = 0
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def base_len(self) -> int:
        """Length of the text before this commit."""
        return self.position


@dataclass(eq=False)
class Request:
    """What the scheduler knows about one choice of a request that has not ended.

    Attributes:
        new: what was asked for, with this choice's own settings.
        family: the choices of the same request.
        seq_id: the group's name for it while it runs; 0 while it waits.
        text: committed tokens, prompt and output.
        end_len: length at which the text ends whatever it says (``max_tokens``, context or cache).
        kv_len: positions whose keys and values are valid.
        blocks: its block table.
        blocks_told: entries of ``blocks`` that the group knows.
        is_told: whether the group knows the sequence at all.
        num_scored: log-probabilities of the prompt that are known; the others are those of its last tokens.
        unreported: those that wait for the first token of the output.
        num_speculative_tokens: most tokens that a round verifies.
        level: how many of them the present load of the group leaves.
        proposal: newest proposal that may still continue the text, as it came from draft ``proposal_draft``.
        num_failures: times that the group failed in a step of this request.
        failed_at: length of the text at the last of them.
        runs_alone: whether it is suspected of being the reason, and shares no step (``suspects.py``).
        sat_out: whether it stayed out of the last step to wait for a proposal.
        queued_at: when it came, until its first step.
        committed_at: when tokens of it became permanent last.
        ended: set once the request is over; its step may still be in flight.
        trace: None where it is not traced.
    """

    new: NewRequest
    text: HashedTokens
    end_len: int
    num_speculative_tokens: int
    cutter: Cutter
    stats: SpeculationStats
    throttle: Throttle  # of draft workers
    lookup_throttle: Throttle
    family: Family
    level: Level = Level.FULL
    lookup: Lookup | None = None
    seq_id: int = 0
    kv_len: int = 0
    blocks: list[int] = field(default_factory=list)
    blocks_told: int = 0
    is_told: bool = False
    num_scored: int = 0
    unreported: list[TokenLogprobs] = field(default_factory=list)
    proposal: Proposal | None = None
    proposal_draft: str = ""
    session: DraftSession | None = None
    excluded_drafts: set[str] = field(default_factory=set)
    num_lost_sessions: int = 0
    draft_retry_at: float = 0.0
    num_failures: int = 0
    failed_at: int = 0
    runs_alone: bool = False
    sat_out: bool = False
    queued_at: float | None = None
    committed_at: float | None = None
    ended: bool = False
    trace: RequestTrace | None = None

    @property
    def choice(self) -> int:
        return self.new.sampling.choice

    @property
    def prompt_len(self) -> int:
        return len(self.new.prompt_tokens)

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log-probabilities are still to come. Nothing comes before the first."""
        return 0 if self.new.sampling.prompt_logprobs is None else self.prompt_len - 1 - self.num_scored

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.new.eos_token_ids | self.new.stop_token_ids

    @property
    def num_missing(self) -> int:
        """Committed tokens whose keys and values are not computed yet; 1 while it decodes."""
        return len(self.text) - self.kv_len

    @property
    def is_governed(self) -> bool:
        """Whether the load of the group decides how much it speculates: a number of its own is taken as it is."""
        return self.new.num_speculative_tokens is None and self.num_speculative_tokens > 0

    @property
    def num_allowed_tokens(self) -> int:
        """Most tokens that a round verifies at the present load."""
        return num_allowed(self.num_speculative_tokens, self.level)

    @property
    def num_useful_proposals(self) -> int:
        """Most proposal tokens that can all be accepted: the round's own token must still fit behind them."""
        return max(0, min(self.num_allowed_tokens, self.end_len - len(self.text) - 1))

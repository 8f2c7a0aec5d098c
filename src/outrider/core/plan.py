"""One step of a target group as plain data: what the scheduler asks for and what the leader answers.

The rows of a sequence in a step are its new tokens: a prefill chunk, or the last committed token followed by a
proposal. Row ``i`` of a chain sits at position ``kv_len + i``. Its logits, if wanted, are the distribution of the token
at the next position. After a step that verified ``k`` proposal tokens and accepted ``a`` of them, keys and values of
``kv_len + 1 + a`` positions are valid; the next plan's ``kv_len`` says so to every rank.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.core.logprobs import TokenLogprobs
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling


class PlanKind(enum.IntEnum):
    VERIFY = 1
    DRAFT = 2


class SequenceError(enum.IntEnum):
    """Why a sequence commits nothing in a step. All but the last two are final: the same plan would fail again."""

    INVALID_LOGITS = 1
    INVALID_PLAN = 2
    NOTHING_ALLOWED = 3
    NOT_READY = 4  # its grammar is still being compiled; the rows ran: plan the last text token again
    UNDECIDED = 5  # the plan was made ahead, and the step before left the sequence with an error: nothing ran


@dataclass(frozen=True)
class SequencePlan:
    """The rows of one sequence. Fields as in ``target.proto``."""

    seq_id: int
    generation: int
    kv_len: int
    tokens: tuple[int, ...]
    block_keep: int = 0
    block_append: tuple[int, ...] = ()
    num_proposal_tokens: int = 0
    parents: tuple[int, ...] = ()
    draft_rows: tuple[SparseRow, ...] = ()
    logits_rows: tuple[int, ...] = ()
    commit_path: tuple[int, ...] = ()
    sampling: Sampling | None = None  # with the first plan of a sequence
    scored_tokens: tuple[int, ...] = ()  # what follows the first of logits_rows; see rows_fault
    prefix_tokens: tuple[int, ...] = ()  # of positions below kv_len, where a first plan starts above 0 and needs them

    @property
    def num_text_tokens(self) -> int:
        """Tokens that are no proposal."""
        return len(self.tokens) - self.num_proposal_tokens

    @property
    def proposal(self) -> tuple[int, ...]:
        """The tokens that are to be verified."""
        return self.tokens[self.num_text_tokens :]

    @property
    def verified_rows(self) -> tuple[int, ...]:
        """The rows of ``logits_rows`` that verification looks at: all but the scored ones."""
        return self.logits_rows[len(self.scored_tokens) :]


@dataclass(frozen=True)
class StepPlan:
    """One forward pass of the group. Fields as in ``target.proto``; for ``after_step`` see ``core/ahead.py``.

    ``traces``: for sequences whose requests are traced, their id and the span that theirs in this step belong to.
    """

    epoch: int
    step: int
    sequences: tuple[SequencePlan, ...]
    released: tuple[int, ...] = ()
    kind: PlanKind = PlanKind.VERIFY
    draft_layers: tuple[int, ...] = ()
    feature_layers: tuple[int, ...] = ()
    after_step: int | None = None
    traces: tuple[tuple[int, str], ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)


@dataclass(frozen=True)
class SequenceResult:
    """What a step did for one sequence.

    ``committed`` holds the accepted proposal tokens and the token that follows them; it is empty where no logits were
    wanted or ``error`` is set.
    """

    seq_id: int
    generation: int
    num_accepted: int = 0
    committed: tuple[int, ...] = ()
    accepted_path: tuple[int, ...] = ()
    error: SequenceError | None = None
    error_message: str = ""
    proposals: tuple[Proposal, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each committed token, where they are asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of the plan's scored_tokens
    num_forced_tokens: int = 0  # proposal tokens in whose place the grammar left no choice
    num_forced_accepted: int = 0
    grammar_us: int = 0


@dataclass(frozen=True)
class RankReport:
    rank: int
    num_sequences: int
    committed_checksum: int


@dataclass(frozen=True)
class StepTiming:
    total_ms: float = 0.0
    plan_ms: float = 0.0
    forward_ms: float = 0.0
    verify_ms: float = 0.0


@dataclass(frozen=True)
class StepResult:
    epoch: int
    step: int
    sequences: tuple[SequenceResult, ...]
    ranks: tuple[RankReport, ...] = ()
    timing: StepTiming = StepTiming()


@dataclass(frozen=True)
class GroupInfo:
    """What a target group is, as its leader tells a scheduler. Fields as ``Attached`` in ``target.proto``."""

    group_id: str
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    row_invariant: bool
    dtype: str
    max_num_seqs: int = 64


def rows_fault(plan: SequencePlan) -> str | None:
    """How the rows that a plan wants logits of contradict its tokens, or None.

    With n tokens, of which the last k are the proposal, the rows are

    - none: a prompt chunk that is not the last;
    - n - k - 1 .. n - 1: the verification of the proposal, or with k = 0 the decision of the next token;
    - 0 .. n - 1 with n - k - 1 scored tokens: the same after a last prompt chunk that is scored;
    - 0 .. n - 1 with n scored tokens and no proposal: an earlier prompt chunk that is scored.

    ``scored_tokens[i]`` is the prompt's token that follows row i.
    """
    num_rows, num_scored = len(plan.tokens), len(plan.scored_tokens)
    if num_rows == 0:
        return "the sequence has no tokens to run"
    if plan.num_proposal_tokens >= num_rows:
        return f"{plan.num_proposal_tokens} proposal tokens leave none of {num_rows} to continue from"
    missing = next((row for row in plan.logits_rows if not 0 <= row < num_rows), None)
    if missing is not None:
        return f"logits row {missing} does not exist: there are {num_rows}"
    first = plan.num_text_tokens - 1
    every = tuple(range(num_rows))
    if num_scored == 0:
        if plan.logits_rows == every[first:] or (not plan.logits_rows and not plan.num_proposal_tokens):
            return None
        return (
            f"logits_rows are {_ranges(plan.logits_rows)}, but a proposal of {plan.num_proposal_tokens} among "
            f"{num_rows} rows is verified with rows {first} to {num_rows - 1}"
        )
    if num_scored != first and (num_scored != num_rows or plan.num_proposal_tokens):
        return f"{num_scored} scored tokens, but of {num_rows} rows with a proposal of {plan.num_proposal_tokens} " + (
            f"{first} can be scored" if plan.num_proposal_tokens else f"{first} or all can be scored"
        )
    if plan.logits_rows != every:
        return f"logits_rows are {_ranges(plan.logits_rows)}, but a chunk that is scored wants all {num_rows}"
    return None


def _ranges(rows: Sequence[int]) -> str:
    """The rows in a line that stays short."""
    shown = ", ".join(str(row) for row in rows[:16])
    return f"[{shown}, ... {len(rows)} in all]" if len(rows) > 16 else f"[{shown}]"


def committed_checksum(lengths: Iterable[tuple[int, int]]) -> int:
    """53-bit checksum over (sequence id, committed length) pairs, in any order: exact in a float64."""
    total = 0
    for seq_id, length in lengths:
        digest = hashlib.blake2b(struct.pack("<QQ", seq_id, length), digest_size=8).digest()
        total = (total + int.from_bytes(digest, "little")) & ((1 << 53) - 1)
    return total

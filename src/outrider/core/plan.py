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
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.core.logprobs import TokenLogprobs
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling


class PlanKind(enum.IntEnum):
    VERIFY = 1
    DRAFT = 2


class SequenceError(enum.IntEnum):
    INVALID_LOGITS = 1
    INVALID_PLAN = 2


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
    prefix_tokens: tuple[
        int, ...
    ] = ()  # positions below kv_len, where the first plan starts above 0 and they are needed

    @property
    def verified_rows(self) -> tuple[int, ...]:
        """The rows of ``logits_rows`` that verification looks at: all but the scored ones."""
        return self.logits_rows[len(self.scored_tokens) :]


@dataclass(frozen=True)
class StepPlan:
    """One forward pass of the group. Fields as in ``target.proto``."""

    epoch: int
    step: int
    sequences: tuple[SequencePlan, ...]
    released: tuple[int, ...] = ()
    kind: PlanKind = PlanKind.VERIFY
    draft_layers: tuple[int, ...] = ()
    feature_layers: tuple[int, ...] = ()
    after_step: int | None = None

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


def committed_checksum(lengths: Iterable[tuple[int, int]]) -> int:
    """53-bit checksum over (sequence id, committed length) pairs, in any order: exact in a float64."""
    total = 0
    for seq_id, length in lengths:
        digest = hashlib.blake2b(struct.pack("<QQ", seq_id, length), digest_size=8).digest()
        total = (total + int.from_bytes(digest, "little")) & ((1 << 53) - 1)
    return total

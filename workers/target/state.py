"""What a rank holds of its sequences, and how a plan changes it.

``SequenceTable.apply`` is a pure function of the plan and of what earlier plans left behind: it reads no clock, no
random number and no tensor. So every rank of a group admits and refuses the same sequences without asking the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.controls import needs_text, sampling_fault
from outrider.core.plan import SequencePlan, StepPlan, committed_checksum, rows_fault
from outrider.core.sampling import Sampling


@dataclass(frozen=True)
class Limits:
    """What a group can hold. Equal on all its ranks."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int  # in one plan


@dataclass
class SequenceState:
    """One sequence on one rank.

    Attributes:
        kv_len: positions that the last plan declared committed.
        held: positions that were computed; those from ``kv_len`` on may hold rejected tokens.
        tokens: of the held positions, where the sampling looks at them (``controls.needs_text``); else None.
    """

    seq_id: int
    generation: int
    sampling: Sampling
    block_table: list[int] = field(default_factory=list)
    kv_len: int = 0
    held: int = 0
    tokens: list[int] | None = None


@dataclass(frozen=True)
class Admitted:
    """A sequence whose rows run in this step. ``block_table`` is a copy, as long as the rows need.

    ``text``: the tokens of all positions up to the plan's last one, where the sampling looks at them; else empty.
    """

    index: int  # in plan.sequences
    plan: SequencePlan
    sampling: Sampling
    block_table: tuple[int, ...]
    text: Sequence[int] = ()


@dataclass(frozen=True)
class Refused:
    """A sequence that takes no part in this step; what the rank holds of it did not change."""

    index: int  # in plan.sequences
    plan: SequencePlan
    message: str


class InvalidPlan(Exception):
    """A plan contradicts what the group holds for one sequence."""


class SequenceTable:
    """The sequences of one rank, by id."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sequences: dict[int, SequenceState] = {}
        # Slots of each block, from its first, whose keys and values were computed.
        self._written = [0] * limits.num_blocks

    def __len__(self) -> int:
        return len(self.sequences)

    def clear(self) -> None:
        """Forget every sequence and everything that was computed."""
        self.sequences.clear()
        self._written = [0] * self.limits.num_blocks

    def apply(self, plan: StepPlan) -> tuple[list[Admitted], list[Refused]]:
        """Forget released sequences, truncate each sequence to its committed length, change block tables.

        After the call the table already counts the rows of the plan as computed. Every sequence of the plan is in
        exactly one of the two lists, in the plan's order.
        """
        for seq_id in plan.released:
            self.sequences.pop(seq_id, None)
        admitted: list[Admitted] = []
        refused: list[Refused] = []
        seen: set[int] = set()
        writers: dict[int, int] = {}  # block -> sequence that writes into it in this step
        room = self.limits.max_num_batched_tokens
        for index, sequence in enumerate(plan.sequences):
            try:
                if sequence.seq_id in seen:
                    raise InvalidPlan("the plan holds the sequence twice")
                if len(sequence.tokens) > room:
                    raise InvalidPlan(
                        f"{len(sequence.tokens)} rows do not fit: a plan carries at most "
                        f"{self.limits.max_num_batched_tokens}, of which {room} are left"
                    )
                if len(admitted) == self.limits.max_num_seqs:
                    raise InvalidPlan(f"the plan holds more than {self.limits.max_num_seqs} sequences")
                state = self._next_state(sequence, writers)
            except InvalidPlan as error:
                refused.append(Refused(index, sequence, str(error)))
                continue
            finally:
                seen.add(sequence.seq_id)
            room -= len(sequence.tokens)
            self._commit(state, writers)
            num_blocks = -(-state.held // self.limits.block_size)
            table = tuple(state.block_table[:num_blocks])
            admitted.append(Admitted(index, sequence, state.sampling, table, state.tokens or ()))
        return admitted, refused

    def checksum(self, seq_ids: Iterable[int]) -> int:
        """53-bit checksum over (id, committed length) of the named sequences, as far as they are held."""
        held = (self.sequences[seq_id] for seq_id in sorted(set(seq_ids)) if seq_id in self.sequences)
        return committed_checksum((state.seq_id, state.kv_len) for state in held)

    def _next_state(self, plan: SequencePlan, writers: dict[int, int]) -> SequenceState:
        """The sequence as it is once the plan's rows ran. Changes nothing."""
        _check_rows(plan, self.limits)
        if plan.sampling is not None:
            fault = sampling_fault(plan.sampling, self.limits.vocab_size)
            if fault is not None:
                raise InvalidPlan(fault)
        state = self.sequences.get(plan.seq_id)
        if state is not None and plan.generation < state.generation:
            raise InvalidPlan(f"generation {plan.generation} is older than the current one, {state.generation}")
        if state is None or plan.generation > state.generation or (plan.sampling is not None and plan.block_keep == 0):
            if plan.sampling is None:
                raise InvalidPlan("the sequence is not known here, and its first plan must carry sampling settings")
            state = SequenceState(plan.seq_id, plan.generation, plan.sampling)
            held = self.limits.max_model_len  # a fork or cached prefix: the blocks say what was computed
        else:
            held = state.held
        if plan.kv_len > held:
            raise InvalidPlan(f"kv_len is {plan.kv_len}, but only {held} positions are held")
        if plan.block_keep > len(state.block_table):
            raise InvalidPlan(f"block_keep is {plan.block_keep}, but the block table has {len(state.block_table)}")
        table = [*state.block_table[: plan.block_keep], *plan.block_append]
        self._check_table(plan, table, writers)
        sampling = plan.sampling or state.sampling
        if plan.scored_tokens and sampling.prompt_logprobs is None:
            raise InvalidPlan("scored_tokens are set, but sampling.prompt_logprobs is not")
        return SequenceState(
            plan.seq_id,
            plan.generation,
            sampling,
            table,
            plan.kv_len,
            plan.kv_len + len(plan.tokens),
            [*_prefix(plan, state), *plan.tokens] if needs_text(sampling) else None,
        )

    def _check_table(self, plan: SequencePlan, table: Sequence[int], writers: dict[int, int]) -> None:
        size = self.limits.block_size
        end = plan.kv_len + len(plan.tokens)
        for block in plan.block_append:
            if not 0 <= block < self.limits.num_blocks:
                raise InvalidPlan(f"block {block} does not exist: there are {self.limits.num_blocks}")
        if plan.block_append and len(set(table)) != len(table):
            raise InvalidPlan("a block appears twice in the block table")
        if len(table) * size < end:
            raise InvalidPlan(f"{len(table)} blocks of {size} positions do not hold {end}")
        # Blocks that the sequence keeps are covered by its held length.
        for index in range(plan.block_keep, -(-plan.kv_len // size)):
            wanted = min(size, plan.kv_len - index * size)
            if self._written[table[index]] < wanted:
                raise InvalidPlan(
                    f"kv_len is {plan.kv_len}, but block {table[index]} of the table holds "
                    f"{self._written[table[index]]} computed positions where {wanted} are needed"
                )
        for block in table[plan.kv_len // size : -(-end // size)]:
            if block in writers:
                raise InvalidPlan(f"block {block} is written by sequence {writers[block]} in the same step")

    def _commit(self, state: SequenceState, writers: dict[int, int]) -> None:
        self.sequences[state.seq_id] = state
        size = self.limits.block_size
        for index in range(state.kv_len // size, -(-state.held // size)):
            block = state.block_table[index]
            writers[block] = state.seq_id
            self._written[block] = min(size, state.held - index * size)


def _prefix(plan: SequencePlan, state: SequenceState) -> Sequence[int]:
    """The tokens below ``kv_len``: what the group holds, or what the plan brings along."""
    if plan.prefix_tokens:
        if len(plan.prefix_tokens) != plan.kv_len:
            raise InvalidPlan(f"kv_len is {plan.kv_len}, but {len(plan.prefix_tokens)} prefix_tokens came")
        return plan.prefix_tokens
    held = state.tokens or ()
    if len(held) < plan.kv_len:
        raise InvalidPlan(
            f"the sampling looks at the text, but of {plan.kv_len} tokens before the plan's {len(held)} are held: "
            "prefix_tokens must name them"
        )
    return held[: plan.kv_len]


def _check_rows(plan: SequencePlan, limits: Limits) -> None:
    fault = rows_fault(plan)
    if fault is not None:
        raise InvalidPlan(fault)
    num_rows = len(plan.tokens)
    if plan.commit_path:
        raise InvalidPlan("commit_path is set, but this group verifies chains only")
    if plan.parents and plan.parents != tuple(range(-1, plan.num_proposal_tokens - 1)):
        raise InvalidPlan("parents describe a tree, but this group verifies chains only")
    if plan.kv_len + num_rows > limits.max_model_len:
        raise InvalidPlan(f"position {plan.kv_len + num_rows - 1} lies beyond max_model_len {limits.max_model_len}")
    for token in (*plan.tokens, *plan.scored_tokens, *plan.prefix_tokens):
        if not 0 <= token < limits.vocab_size:
            raise InvalidPlan(f"token {token} lies outside the vocabulary of {limits.vocab_size}")

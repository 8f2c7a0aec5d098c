"""What the leader hands to the other ranks, as one flat array of int64.

A message is ``[kind, num_sequences_held, checksum, num_rows, num_refused, plan ...]``. The plan part carries what a
rank needs to run the same rows: everything but the proposal's q rows, which only the leader looks at. Unsigned 64-bit
numbers travel as their two's complement.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from outrider.core.errors import GroupError
from outrider.core.plan import PlanKind, SequencePlan, StepPlan
from outrider.core.sampling import Sampling
from outrider.core.wire import sampling_from_wire, sampling_to_wire
from outrider.v1 import common_pb2

_MASK = (1 << 64) - 1
_SIGN = 1 << 63


class MessageKind(enum.IntEnum):
    """What the other ranks are to do."""

    PLAN = 1  # run one step
    RESET = 2  # forget every sequence
    KEEP_ALIVE = 3  # nothing: the leader is there
    STOP = 4  # end


@dataclass(frozen=True)
class Digest:
    """What a rank holds after it applied a plan. A rank that finds another digest must not run the step."""

    num_sequences: int = 0
    checksum: int = 0
    num_rows: int = 0
    num_refused: int = 0


@dataclass(frozen=True)
class Message:
    """One hand-off. ``plan`` and ``digest`` are set for PLAN only."""

    kind: MessageKind
    plan: StepPlan | None = None
    digest: Digest = Digest()


def encode(message: Message) -> np.ndarray:
    """The message as ``[n] int64``."""
    digest = message.digest
    out = [int(message.kind), digest.num_sequences, digest.checksum, digest.num_rows, digest.num_refused]
    if message.plan is not None:
        _put_plan(out, message.plan)
    return np.array(out, dtype=np.int64)


def decode(values: np.ndarray) -> Message:
    """The inverse of ``encode``, except that ``draft_rows`` are empty. Raises ``GroupError`` for a damaged array."""
    reader = _Reader(values.tolist())
    try:
        kind = MessageKind(reader.take())
        digest = Digest(reader.take(), reader.take(), reader.take(), reader.take())
        plan = _get_plan(reader) if kind is MessageKind.PLAN else None
    except (ValueError, IndexError) as error:
        raise GroupError(f"the leader's hand-off is damaged: {error}") from error
    if reader.position != len(values):
        raise GroupError(f"the leader's hand-off is damaged: {len(values) - reader.position} numbers too many")
    return Message(kind, plan, digest)


class _Reader:
    def __init__(self, values: list[int]) -> None:
        self.values = values
        self.position = 0

    def take(self) -> int:
        value = self.values[self.position]
        self.position += 1
        return value

    def take_unsigned(self) -> int:
        return self.take() & _MASK

    def take_many(self) -> tuple[int, ...]:
        return self.take_exactly(self.take())

    def take_exactly(self, count: int) -> tuple[int, ...]:
        end = self.position + count
        if count < 0 or end > len(self.values):
            raise ValueError(f"a list of {count} numbers at {self.position} of {len(self.values)}")
        values = tuple(self.values[self.position : end])
        self.position = end
        return values


def _signed(value: int) -> int:
    return value - (1 << 64) if value & _SIGN else value


def _put_many(out: list[int], values: tuple[int, ...]) -> None:
    out.append(len(values))
    out.extend(values)


def _put_plan(out: list[int], plan: StepPlan) -> None:
    out += [_signed(plan.epoch), _signed(plan.step), int(plan.kind)]
    _put_many(out, () if plan.after_step is None else (_signed(plan.after_step),))
    _put_many(out, plan.draft_layers)
    _put_many(out, plan.feature_layers)
    _put_many(out, tuple(_signed(seq_id) for seq_id in plan.released))
    out.append(len(plan.traces))
    for seq_id, traceparent in plan.traces:
        out.append(_signed(seq_id))
        _put_bytes(out, traceparent.encode())
    out.append(len(plan.sequences))
    for sequence in plan.sequences:
        out += [
            _signed(sequence.seq_id),
            _signed(sequence.generation),
            sequence.kv_len,
            sequence.block_keep,
            sequence.num_proposal_tokens,
        ]
        for values in (
            sequence.block_append,
            sequence.tokens,
            sequence.parents,
            sequence.logits_rows,
            sequence.commit_path,
            sequence.scored_tokens,
            sequence.prefix_tokens,
        ):
            _put_many(out, values)
        _put_sampling(out, sequence.sampling)


def _get_plan(reader: _Reader) -> StepPlan:
    epoch, step, kind = reader.take_unsigned(), reader.take_unsigned(), PlanKind(reader.take())
    after_step = reader.take_many()
    draft_layers, feature_layers = reader.take_many(), reader.take_many()
    released = tuple(seq_id & _MASK for seq_id in reader.take_many())
    traces = tuple((reader.take_unsigned(), _get_bytes(reader, reader.take()).decode()) for _ in range(reader.take()))
    sequences = tuple(_get_sequence(reader) for _ in range(reader.take()))
    return StepPlan(
        epoch,
        step,
        sequences,
        released,
        kind,
        draft_layers,
        feature_layers,
        after_step[0] & _MASK if after_step else None,
        traces,
    )


def _get_sequence(reader: _Reader) -> SequencePlan:
    seq_id, generation = reader.take_unsigned(), reader.take_unsigned()
    kv_len, block_keep, num_proposal_tokens = reader.take(), reader.take(), reader.take()
    block_append, tokens, parents = reader.take_many(), reader.take_many(), reader.take_many()
    logits_rows, commit_path = reader.take_many(), reader.take_many()
    scored_tokens, prefix_tokens = reader.take_many(), reader.take_many()
    return SequencePlan(
        seq_id=seq_id,
        generation=generation,
        kv_len=kv_len,
        tokens=tokens,
        block_keep=block_keep,
        block_append=block_append,
        num_proposal_tokens=num_proposal_tokens,
        parents=parents,
        logits_rows=logits_rows,
        commit_path=commit_path,
        sampling=_get_sampling(reader),
        scored_tokens=scored_tokens,
        prefix_tokens=prefix_tokens,
    )


def _put_sampling(out: list[int], sampling: Sampling | None) -> None:
    """Once for each sequence, and with strings in it: as the protocol's own message."""
    if sampling is None:
        out.append(-1)
    else:
        _put_bytes(out, sampling_to_wire(sampling).SerializeToString(deterministic=True))


def _put_bytes(out: list[int], data: bytes) -> None:
    out.append(len(data))
    out.extend(np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), dtype="<i8").tolist())


def _get_bytes(reader: _Reader, size: int) -> bytes:
    return np.array(reader.take_exactly(-(-size // 8)), dtype="<i8").tobytes()[:size]


def _get_sampling(reader: _Reader) -> Sampling | None:
    size = reader.take()
    if size < 0:
        return None
    data = _get_bytes(reader, size)
    try:
        return sampling_from_wire(common_pb2.Sampling.FromString(data))
    except DecodeError as error:
        raise ValueError(f"sampling settings: {error}") from error

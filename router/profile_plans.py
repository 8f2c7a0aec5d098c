"""What `outrider profile` runs at the target: which passes, as plans, and how their times are summed up.

A *point* is a number of sequences, the positions that each has in the cache, and the rows that each runs: 1 row is a
plain step, ``k + 1`` rows are the verification of ``k`` tokens. A *stage* is all points of the same sequences and
context. It enters the context once; each measured pass then starts behind it, so what the pass before it computed is
void, as after a rejection. Passes of a stage take turns, so that a drift of the machine's speed falls on all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from outrider.core.errors import InvalidRequest
from outrider.core.plan import GroupInfo, SequencePlan, StepResult
from outrider.core.sampling import Sampling, Verifier

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32)
CONTEXTS = (128, 512, 1024, 2048, 4096)
MAX_RUNS = 1000
MAX_VALUES = 64  # of each list of a request
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)

# Sequences of a pass and, once it ran, its result and the milliseconds until that came.
Passes = Generator[tuple[SequencePlan, ...], tuple[StepResult, float], None]


@dataclass(frozen=True)
class ProfileSettings:
    """What is to be measured. Empty lists take the defaults, as far as the group has room for them."""

    rows: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    num_sequences: tuple[int, ...] = ()
    num_runs: int = 5
    num_proposals: int = 40

    def check(self) -> None:
        """Raises ``InvalidRequest``."""
        for name in ("rows", "contexts", "num_sequences"):
            values = getattr(self, name)
            if len(values) > MAX_VALUES:
                raise InvalidRequest(name, f"a list of {len(values)}", f"a list of at most {MAX_VALUES} numbers")
            if any(value < 1 for value in values):
                raise InvalidRequest(name, list(values), "a list of numbers from 1 on")
        for name, least in (("num_runs", 1), ("num_proposals", 0)):
            if not least <= getattr(self, name) <= MAX_RUNS:
                raise InvalidRequest(name, getattr(self, name), f"from {least} to {MAX_RUNS}")


@dataclass(frozen=True)
class Stage:
    """Points that share their sequences and context."""

    context: int
    num_sequences: int
    rows: tuple[int, ...]

    def num_blocks(self, block_size: int) -> int:
        """Blocks of each sequence."""
        return -(-(self.context + max(self.rows)) // block_size)


@dataclass(frozen=True)
class Sample:
    """One measured pass, in milliseconds."""

    forward_ms: float
    overhead_ms: float
    plan_ms: float
    verify_ms: float


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some values."""

    p50: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass
class StageSamples:
    """What was measured of a stage so far: for each number of rows its samples, in order."""

    stage: Stage
    num_runs: int
    samples: dict[int, list[Sample]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.num_runs * len(self.stage.rows)

    @property
    def done(self) -> int:
        return sum(len(samples) for samples in self.samples.values())


def choose_stages(settings: ProfileSettings, info: GroupInfo) -> tuple[list[Stage], list[str]]:
    """The stages that a group has room for, and what was asked for and left out."""
    left_out: list[str] = []
    stages: list[Stage] = []
    named = bool(settings.contexts)
    for count in settings.num_sequences or (1,):
        if count > info.max_num_seqs:
            left_out.append(f"{count} sequences: a pass holds at most {info.max_num_seqs}")
            continue
        most = info.max_num_batched_tokens // count
        rows = tuple(dict.fromkeys(rows for rows in settings.rows or ROWS if rows <= most))
        left_out += [
            f"{count} x {each} rows: a pass holds at most {info.max_num_batched_tokens}"
            for each in settings.rows
            if each > most
        ]
        before = len(stages)
        for context in dict.fromkeys(settings.contexts or CONTEXTS):
            stage = Stage(context, count, rows)
            reason = _no_room(stage, info) if rows else "no rows"
            if reason is None:
                stages.append(stage)
            elif named:
                left_out.append(f"{count} x {context} positions: {reason}")
        if not named and rows and len(stages) == before:  # a very short context: what fits
            room = min(info.max_model_len, info.num_blocks // count * info.block_size) - max(rows)
            if room >= 1:
                stages.append(Stage(room, count, rows))
    return stages, left_out


def _no_room(stage: Stage, info: GroupInfo) -> str | None:
    end = stage.context + max(stage.rows)
    if end > info.max_model_len:
        return f"with {max(stage.rows)} rows they exceed the context of {info.max_model_len}"
    wanted = stage.num_sequences * stage.num_blocks(info.block_size)
    return f"they take {wanted} of {info.num_blocks} cache blocks" if wanted > info.num_blocks else None


def passes(measured: StageSamples, info: GroupInfo, seq_ids: Sequence[int], blocks: Sequence[Sequence[int]]) -> Passes:
    """The passes that a stage still needs, one after the other; appends to ``measured`` what each sample shows.

    ``blocks[i]`` are those of the sequence ``seq_ids[i]``. Can be left at any pass and begun anew with other blocks.
    """
    stage = measured.stage
    for index, seq_id in enumerate(seq_ids):
        chunk = info.max_num_batched_tokens
        for start in range(0, stage.context, chunk):
            tokens = _tokens(index, start, min(start + chunk, stage.context), info.vocab_size)
            yield (
                SequencePlan(
                    seq_id,
                    generation=1,
                    kv_len=start,
                    tokens=tokens,
                    block_keep=0 if start == 0 else len(blocks[index]),
                    block_append=tuple(blocks[index]) if start == 0 else (),
                    sampling=GREEDY if start == 0 else None,
                ),
            )
    is_warm = False
    while not is_warm or measured.done < measured.total:
        for rows in stage.rows:
            if is_warm and len(measured.samples.get(rows, ())) == measured.num_runs:
                continue
            result, round_trip_ms = yield tuple(
                SequencePlan(
                    seq_id,
                    generation=1,
                    kv_len=stage.context,
                    tokens=_tokens(index, stage.context, stage.context + rows, info.vocab_size),
                    block_keep=len(blocks[index]),
                    num_proposal_tokens=rows - 1,
                    logits_rows=tuple(range(rows)),
                )
                for index, seq_id in enumerate(seq_ids)
            )
            if is_warm:
                measured.samples.setdefault(rows, []).append(_sample(result, round_trip_ms))
        is_warm = True


def _sample(result: StepResult, round_trip_ms: float) -> Sample:
    timing = result.timing
    return Sample(timing.forward_ms, max(0.0, round_trip_ms - timing.forward_ms), timing.plan_ms, timing.verify_ms)


def _tokens(index: int, start: int, stop: int, vocab_size: int) -> tuple[int, ...]:
    """Tokens that differ from place to place and from sequence to sequence; what they are costs nothing."""
    return tuple((7919 * position + 104729 * index + 13) % vocab_size for position in range(start, stop))

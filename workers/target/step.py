"""What every rank does in a step: apply the plan, run the rows, exchange what the decision needs.

Ranks exchange, in one collective, what each holds (``RankReport``) and for each row that greedy or unfiltered coupled
verification looks at the best (value, token) pair of the rank's slice of the vocabulary. Rows of sequences that need
whole distributions are gathered in a second collective, which only steps with such sequences pay for. Rows of prompts
that are scored may be many: their logits are computed, gathered and scored in slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.controls import gather_needed
from outrider.core.errors import GroupError
from outrider.core.logprobs import TokenLogprobs
from outrider.core.plan import RankReport, StepPlan
from outrider.core.sampling import Sampling
from outrider.kernels.batched.best import BestRows, best_of
from outrider.kernels.batched.logprobs import score
from outrider.kernels.batched.rows import take
from outrider.kernels.reference.verify import pairs_suffice
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.parallel import Parallel
from outrider.workers.target.codec import Digest
from outrider.workers.target.state import Admitted, Refused, SequenceTable

# Scored rows whose logits are there at once: at 150,000 tokens 40 MB, and a few times that while they are scored.
SCORED_ROWS = 64


class EngineLike(Protocol):
    """The part of ``workers.engine.Engine`` that a step uses."""

    vocab_offset: int
    device: torch.device

    def forward(self, batch: Sequence[SequenceRows]) -> Tensor: ...
    def local_logits(self, hidden: Tensor) -> Tensor: ...
    def gather_logits(self, local_logits: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Admission:
    """What the ranks agreed to run; the same on each."""

    admitted: list[Admitted]
    refused: list[Refused]
    digest: Digest


@dataclass(frozen=True)
class Rows:
    """Rows ``start .. stop - 1`` of the step's verified logits: those of one sequence."""

    sequence: Admitted
    start: int
    stop: int

    @property
    def first_position(self) -> int:
        """Position of the token that the first row is the distribution of."""
        return self.sequence.plan.kv_len + self.sequence.plan.verified_rows[0] + 1


@dataclass(frozen=True)
class Computed:
    """This rank's share of what a forward pass gives. Both are None where no sequence needs them."""

    logits: Tensor | None  # [num_verified, local_vocab_size] float32, rows of all sequences in order
    scored: Tensor | None  # [num_scored, hidden]: hidden rows whose next token is known, in order


@dataclass(frozen=True)
class Exchanged:
    """What the leader decides from. Tensors are None where no sequence needs them.

    ``prompt_logprobs`` holds, for the index of each sequence that is scored, its entries, or None where a row holds no
    distribution; on the leader only.
    """

    reports: tuple[RankReport, ...]
    best_values: Tensor | None  # [world_size, num_best] float64, rows of the sequences of best_rows in order
    best_tokens: Tensor | None  # [world_size, num_best] int64
    full_logits: Tensor | None  # [num_full, vocab_size] float32, rows of the sequences of full_rows in order
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...] | None] = field(default_factory=dict)


def verified_rows(admitted: Sequence[Admitted]) -> list[Rows]:
    """Where each sequence's verified rows lie among all of the step, in order."""
    rows: list[Rows] = []
    start = 0
    for sequence in admitted:
        stop = start + len(sequence.plan.verified_rows)
        if stop > start:
            rows.append(Rows(sequence, start, stop))
        start = stop
    return rows


def needs_best_only(sampling: Sampling) -> bool:
    """Whether one (value, token) pair from each rank decides a row."""
    suffices = pairs_suffice(sampling.verifier.label, top_k=sampling.top_k, top_p=sampling.top_p)
    return suffices and not gather_needed(sampling)


class RankStep:
    """One rank's share of every step."""

    def __init__(self, engine: EngineLike, parallel: Parallel, table: SequenceTable) -> None:
        self.engine = engine
        self.parallel = parallel
        self.table = table

    def admit(self, plan: StepPlan) -> Admission:
        """Apply the plan to this rank's table."""
        admitted, refused = self.table.apply(plan)
        digest = Digest(
            num_sequences=len(self.table),
            checksum=self.table.checksum(sequence.seq_id for sequence in plan.sequences),
            num_rows=sum(len(sequence.plan.tokens) for sequence in admitted),
            num_refused=len(refused),
        )
        return Admission(admitted, refused, digest)

    def forward(self, admission: Admission) -> Computed:
        """Run the admitted rows."""
        if not admission.admitted:
            return Computed(None, None)
        hidden = self.engine.forward(
            [
                SequenceRows(
                    tokens=sequence.plan.tokens,
                    start=sequence.plan.kv_len,
                    block_table=sequence.block_table,
                    logits_rows=sequence.plan.logits_rows,
                )
                for sequence in admission.admitted
            ]
        )  # [num_wanted, hidden]: of each sequence the scored rows, then the verified ones
        verified: list[int] = []
        scored: list[int] = []
        start = 0
        for sequence in admission.admitted:
            stop = start + len(sequence.plan.logits_rows)
            middle = start + len(sequence.plan.scored_tokens)
            scored += range(start, middle)
            verified += range(middle, stop)
            start = stop
        if not scored:
            return Computed(self.engine.local_logits(hidden) if verified else None, None)
        return Computed(self.engine.local_logits(hidden[verified]) if verified else None, hidden[scored])

    def exchange(self, admission: Admission, computed: Computed) -> Exchanged:
        """Collective: every rank calls it once in each step. computed as ``forward`` returned it."""
        logits = computed.logits
        rows = verified_rows(admission.admitted) if logits is not None else []
        best = [span for span in rows if needs_best_only(span.sequence.sampling)]
        full = [span for span in rows if not needs_best_only(span.sequence.sampling)]
        values, tokens = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
        if best and logits is not None:
            spans = [BestRows(span.start, span.stop, span.sequence.sampling, span.first_position) for span in best]
            values, tokens = best_of(logits, self.engine.vocab_offset, spans, is_alone=self.parallel.world_size == 1)
        reports, all_values, all_tokens = self._share(admission.digest, values, tokens)
        full_logits = None
        if full and logits is not None:
            indices = [i for span in full for i in range(span.start, span.stop)]
            full_logits = self.engine.gather_logits(take(logits, indices))
        return Exchanged(
            reports,
            all_values if best else None,
            all_tokens if best else None,
            full_logits,
            self._score(admission.admitted, computed.scored),
        )

    def _share(self, digest: Digest, values: Tensor, tokens: Tensor) -> tuple[tuple[RankReport, ...], Tensor, Tensor]:
        """What every rank holds, and its pairs, [num_best] each here and [world_size, num_best] there."""
        report = [digest.num_sequences, digest.checksum]
        if self.parallel.world_size == 1:
            return (RankReport(0, *report),), values[None], tokens[None]
        packed = torch.cat([torch.tensor(report, dtype=torch.int64), values.view(torch.int64), tokens])
        gathered = torch.stack(
            [part.cpu() for part in self.parallel.gather(packed.to(self.engine.device))]
        )  # [world_size, 2 + 2 * num_best] int64
        reports = tuple(RankReport(rank, int(row[0]), int(row[1])) for rank, row in enumerate(gathered))
        num_best = len(tokens)
        return reports, gathered[:, 2 : 2 + num_best].contiguous().view(torch.float64), gathered[:, 2 + num_best :]

    def _score(
        self, admitted: Sequence[Admitted], hidden: Tensor | None
    ) -> dict[int, tuple[TokenLogprobs, ...] | None]:
        """Prompt log-probabilities, on the leader; every rank takes part. hidden: [num_scored, hidden]"""
        scores: dict[int, tuple[TokenLogprobs, ...] | None] = {}
        first = 0
        for sequence in admitted if hidden is not None else ():
            tokens = sequence.plan.scored_tokens
            entries: list[TokenLogprobs] = []
            is_valid = True
            for start in range(0, len(tokens), SCORED_ROWS):
                part = tokens[start : start + SCORED_ROWS]
                rows = hidden[first + start : first + start + len(part)]  # type: ignore[index]
                logits = self.engine.gather_logits(self.engine.local_logits(rows))
                if self.parallel.rank == 0:
                    is_valid = is_valid and bool(torch.isfinite(logits.amax(dim=-1)).all())
                    entries += score(logits, part, sequence.sampling.prompt_logprobs or 0) if is_valid else []
            if tokens:
                scores[sequence.index] = tuple(entries) if is_valid else None
            first += len(tokens)
        return scores


def check_reports(reports: Sequence[RankReport]) -> None:
    """Raises ``GroupError`` unless all ranks hold what the leader holds."""
    leader = reports[0]
    for report in reports[1:]:
        if (report.num_sequences, report.committed_checksum) != (leader.num_sequences, leader.committed_checksum):
            raise GroupError(
                f"rank {report.rank} disagrees about what is committed: {report.num_sequences} sequences, checksum "
                f"{report.committed_checksum:#x}; the leader holds {leader.num_sequences}, "
                f"{leader.committed_checksum:#x}"
            )


def check_digest(rank: int, own: Digest, leader: Digest) -> None:
    """Raises ``GroupError`` where a rank would run other rows than the leader: before it runs any."""
    if own != leader:
        raise GroupError(f"rank {rank} disagrees about what is committed: {own}; the leader holds {leader}")

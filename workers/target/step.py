"""What every rank does in a step: apply the plan, run the rows, exchange what the decision needs.

Ranks exchange, in one collective, what each holds (``RankReport``) and for each row that greedy or unfiltered coupled
verification looks at the best (value, token) pair of the rank's slice of the vocabulary. Rows of sequences that need
whole distributions are gathered in a second collective, which only steps with such sequences pay for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import GroupError
from outrider.core.plan import RankReport, StepPlan
from outrider.core.sampling import Sampling
from outrider.kernels.reference.verify import local_best, pairs_suffice
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.parallel import Parallel
from outrider.workers.target.codec import Digest
from outrider.workers.target.state import Admitted, Refused, SequenceTable


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
    """Rows ``start .. stop - 1`` of the step's wanted logits: those of one sequence."""

    sequence: Admitted
    start: int
    stop: int

    @property
    def first_position(self) -> int:
        """Position of the token that the first row is the distribution of."""
        return self.sequence.plan.kv_len + self.sequence.plan.logits_rows[0] + 1


@dataclass(frozen=True)
class Exchanged:
    """What the leader decides from. Both tensors are None where no sequence needs them."""

    reports: tuple[RankReport, ...]
    best_values: Tensor | None  # [world_size, num_best] float64, rows of the sequences of best_rows in order
    best_tokens: Tensor | None  # [world_size, num_best] int64
    full_logits: Tensor | None  # [num_full, vocab_size] float32, rows of the sequences of full_rows in order


def wanted_rows(admitted: Sequence[Admitted]) -> list[Rows]:
    """Where each sequence's wanted rows lie among all wanted rows of the step, in order."""
    rows: list[Rows] = []
    start = 0
    for sequence in admitted:
        stop = start + len(sequence.plan.logits_rows)
        if stop > start:
            rows.append(Rows(sequence, start, stop))
        start = stop
    return rows


def needs_best_only(sampling: Sampling) -> bool:
    """Whether one (value, token) pair from each rank decides a row."""
    return pairs_suffice(sampling.verifier.label, top_k=sampling.top_k, top_p=sampling.top_p)


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

    def forward(self, admission: Admission) -> Tensor | None:
        """Run the admitted rows. This rank's logits of the wanted ones [num_wanted, local_vocab_size] float32."""
        if not admission.admitted:
            return None
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
        )
        return self.engine.local_logits(hidden) if hidden.shape[0] else None

    def exchange(self, admission: Admission, logits: Tensor | None) -> Exchanged:
        """Collective: every rank calls it once in each step. logits as ``forward`` returned them."""
        rows = wanted_rows(admission.admitted) if logits is not None else []
        best = [span for span in rows if needs_best_only(span.sequence.sampling)]
        full = [span for span in rows if not needs_best_only(span.sequence.sampling)]
        values, tokens = self._best(best, logits)
        num_best = len(tokens)
        report = [admission.digest.num_sequences, admission.digest.checksum]
        packed = torch.cat([torch.tensor(report, dtype=torch.int64), values.view(torch.int64), tokens])
        gathered = torch.stack(
            [part.cpu() for part in self.parallel.gather(packed.to(self.engine.device))]
        )  # [world_size, 2 + 2 * num_best] int64
        reports = tuple(RankReport(rank, int(row[0]), int(row[1])) for rank, row in enumerate(gathered))
        full_logits = None
        if full and logits is not None:
            picked = torch.cat([logits[span.start : span.stop] for span in full])
            full_logits = self.engine.gather_logits(picked)
        return Exchanged(
            reports,
            gathered[:, 2 : 2 + num_best].contiguous().view(torch.float64) if best else None,
            gathered[:, 2 + num_best :] if best else None,
            full_logits,
        )

    def _best(self, spans: Sequence[Rows], logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """This rank's best (values [num_best] float64, token ids [num_best] int64) for every row of the spans."""
        values, tokens = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, dtype=torch.int64)]
        for span in spans:
            if logits is None:
                raise GroupError("a sequence wants logits, but none were computed")
            sampling = span.sequence.sampling
            span_values, span_tokens = local_best(
                logits[span.start : span.stop],
                self.engine.vocab_offset,
                first_position=span.first_position,
                temperature=sampling.temperature,
                seed=sampling.seed,
                choice=sampling.choice,
                verifier=sampling.verifier.label,
            )
            values.append(span_values.cpu())
            tokens.append(span_tokens.cpu())
        return torch.cat(values), torch.cat(tokens)


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

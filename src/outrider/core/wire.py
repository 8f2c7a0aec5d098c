"""Between plain data and messages of ``outrider.v1``. Each pair of functions is its own inverse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.logprobs import LogprobsMode, TokenLogprobs
from outrider.core.plan import (
    GroupInfo,
    PlanKind,
    RankReport,
    SequenceError,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    StepTiming,
)
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.v1 import common_pb2, target_pb2


def sampling_to_wire(sampling: Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        choice=sampling.choice,
        verifier=int(sampling.verifier),  # type: ignore[arg-type]
        controls=controls_to_wire(sampling.controls),
        prompt_len=sampling.prompt_len,
        grammar=grammar_to_wire(sampling.grammar) if sampling.grammar is not None else None,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        logprobs_mode=int(sampling.logprobs_mode),  # type: ignore[arg-type]
    )


def sampling_from_wire(message: common_pb2.Sampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        choice=message.choice,
        verifier=Verifier(message.verifier),
        controls=controls_from_wire(message.controls),
        prompt_len=message.prompt_len,
        grammar=grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logprobs_mode=LogprobsMode(message.logprobs_mode or LogprobsMode.RAW),
    )


def controls_to_wire(controls: Sequence[tuple[str, Any]]) -> dict[str, str]:
    return {name: json.dumps(value, separators=(",", ":"), allow_nan=False) for name, value in controls}


def controls_from_wire(controls: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    """Sorted by name. Raises ``ValueError`` for what is not JSON."""
    return tuple((name, _frozen(json.loads(controls[name]))) for name in sorted(controls))


def _frozen(value: Any) -> Any:
    """JSON with tuples in place of its lists, so that it can be compared and hashed."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def grammar_to_wire(grammar: Grammar) -> common_pb2.Grammar:
    return common_pb2.Grammar(**{grammar.kind.value: grammar.text})


def grammar_from_wire(message: common_pb2.Grammar) -> Grammar | None:
    """None for a message that holds none."""
    kind = message.WhichOneof("kind")
    return Grammar(GrammarKind(kind), getattr(message, kind)) if kind is not None else None


def logprobs_to_wire(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_ids=entry.top_ids,
        top_logprobs=entry.top_logprobs,
    )


def logprobs_from_wire(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        rank=message.rank,
        top_ids=tuple(message.top_ids),
        top_logprobs=tuple(message.top_logprobs),
    )


def row_to_wire(row: SparseRow) -> common_pb2.SparseRow:
    return common_pb2.SparseRow(token_ids=row.token_ids.tolist(), probs=row.probs.tolist())


def row_from_wire(message: common_pb2.SparseRow) -> SparseRow:
    return SparseRow(
        token_ids=np.array(message.token_ids, dtype=np.int64), probs=np.array(message.probs, dtype=np.float32)
    )


def proposal_to_wire(proposal: Proposal) -> common_pb2.Proposal:
    return common_pb2.Proposal(
        proposal_id=proposal.proposal_id,
        base_len=proposal.base_len,
        base_hash=proposal.base_hash,
        tokens=proposal.tokens,
        parents=proposal.parents,
        rows=[row_to_wire(row) for row in proposal.rows],
        drafter=proposal.drafter,
        draft_ms=proposal.draft_ms,
    )


def proposal_from_wire(message: common_pb2.Proposal) -> Proposal:
    return Proposal(
        proposal_id=message.proposal_id,
        base_len=message.base_len,
        base_hash=message.base_hash,
        tokens=tuple(message.tokens),
        parents=tuple(message.parents),
        rows=tuple(row_from_wire(row) for row in message.rows),
        drafter=message.drafter,
        draft_ms=message.draft_ms,
    )


def plan_to_wire(plan: StepPlan) -> target_pb2.StepPlan:
    return target_pb2.StepPlan(
        step=plan.step,
        kind=int(plan.kind),  # type: ignore[arg-type]
        draft_layers=plan.draft_layers,
        sequences=[_sequence_plan_to_wire(sequence) for sequence in plan.sequences],
        released=plan.released,
        after_step=plan.after_step,
        feature_layers=plan.feature_layers,
        traces=[target_pb2.SequenceTrace(seq_id=seq_id, traceparent=parent) for seq_id, parent in plan.traces],
    )


def plan_from_wire(epoch: int, message: target_pb2.StepPlan) -> StepPlan:
    return StepPlan(
        epoch=epoch,
        step=message.step,
        kind=PlanKind(message.kind),
        draft_layers=tuple(message.draft_layers),
        sequences=tuple(_sequence_plan_from_wire(sequence) for sequence in message.sequences),
        released=tuple(message.released),
        after_step=message.after_step if message.HasField("after_step") else None,
        feature_layers=tuple(message.feature_layers),
        traces=tuple((trace.seq_id, trace.traceparent) for trace in message.traces),
    )


def _sequence_plan_to_wire(sequence: SequencePlan) -> target_pb2.SequencePlan:
    return target_pb2.SequencePlan(
        seq_id=sequence.seq_id,
        generation=sequence.generation,
        kv_len=sequence.kv_len,
        commit_path=sequence.commit_path,
        block_keep=sequence.block_keep,
        block_append=sequence.block_append,
        tokens=sequence.tokens,
        num_proposal_tokens=sequence.num_proposal_tokens,
        parents=sequence.parents,
        draft_rows=[row_to_wire(row) for row in sequence.draft_rows],
        logits_rows=sequence.logits_rows,
        sampling=sampling_to_wire(sequence.sampling) if sequence.sampling is not None else None,
        scored_tokens=sequence.scored_tokens,
        prefix_tokens=sequence.prefix_tokens,
    )


def _sequence_plan_from_wire(message: target_pb2.SequencePlan) -> SequencePlan:
    return SequencePlan(
        seq_id=message.seq_id,
        generation=message.generation,
        kv_len=message.kv_len,
        commit_path=tuple(message.commit_path),
        block_keep=message.block_keep,
        block_append=tuple(message.block_append),
        tokens=tuple(message.tokens),
        num_proposal_tokens=message.num_proposal_tokens,
        parents=tuple(message.parents),
        draft_rows=tuple(row_from_wire(row) for row in message.draft_rows),
        logits_rows=tuple(message.logits_rows),
        sampling=sampling_from_wire(message.sampling) if message.HasField("sampling") else None,
        scored_tokens=tuple(message.scored_tokens),
        prefix_tokens=tuple(message.prefix_tokens),
    )


def result_to_wire(result: StepResult) -> target_pb2.StepResult:
    return target_pb2.StepResult(
        step=result.step,
        sequences=[
            target_pb2.SequenceResult(
                seq_id=sequence.seq_id,
                generation=sequence.generation,
                num_accepted=sequence.num_accepted,
                accepted_path=sequence.accepted_path,
                committed=sequence.committed,
                error=int(sequence.error) if sequence.error is not None else 0,  # type: ignore[arg-type]
                error_message=sequence.error_message,
                proposals=[proposal_to_wire(proposal) for proposal in sequence.proposals],
                logprobs=[logprobs_to_wire(entry) for entry in sequence.logprobs],
                prompt_logprobs=[logprobs_to_wire(entry) for entry in sequence.prompt_logprobs],
                num_forced_tokens=sequence.num_forced_tokens,
                num_forced_accepted=sequence.num_forced_accepted,
                grammar_us=sequence.grammar_us,
            )
            for sequence in result.sequences
        ],
        ranks=[
            target_pb2.RankReport(
                rank=report.rank, num_sequences=report.num_sequences, committed_checksum=report.committed_checksum
            )
            for report in result.ranks
        ],
        timing=target_pb2.StepTiming(
            total_ms=result.timing.total_ms,
            plan_ms=result.timing.plan_ms,
            forward_ms=result.timing.forward_ms,
            verify_ms=result.timing.verify_ms,
        ),
    )


def result_from_wire(epoch: int, message: target_pb2.StepResult) -> StepResult:
    return StepResult(
        epoch=epoch,
        step=message.step,
        sequences=tuple(
            SequenceResult(
                seq_id=sequence.seq_id,
                generation=sequence.generation,
                num_accepted=sequence.num_accepted,
                accepted_path=tuple(sequence.accepted_path),
                committed=tuple(sequence.committed),
                error=SequenceError(sequence.error) if sequence.error else None,
                error_message=sequence.error_message,
                proposals=tuple(proposal_from_wire(proposal) for proposal in sequence.proposals),
                logprobs=tuple(logprobs_from_wire(entry) for entry in sequence.logprobs),
                prompt_logprobs=tuple(logprobs_from_wire(entry) for entry in sequence.prompt_logprobs),
                num_forced_tokens=sequence.num_forced_tokens,
                num_forced_accepted=sequence.num_forced_accepted,
                grammar_us=sequence.grammar_us,
            )
            for sequence in message.sequences
        ),
        ranks=tuple(
            RankReport(
                rank=report.rank, num_sequences=report.num_sequences, committed_checksum=report.committed_checksum
            )
            for report in message.ranks
        ),
        timing=StepTiming(
            total_ms=message.timing.total_ms,
            plan_ms=message.timing.plan_ms,
            forward_ms=message.timing.forward_ms,
            verify_ms=message.timing.verify_ms,
        ),
    )


def group_info_to_wire(info: GroupInfo) -> target_pb2.Attached:
    return target_pb2.Attached(**{field: getattr(info, field) for field in GroupInfo.__dataclass_fields__})


def group_info_from_wire(message: target_pb2.Attached) -> GroupInfo:
    return GroupInfo(**{field: getattr(message, field) for field in GroupInfo.__dataclass_fields__})

"""A target group without a model: serves the protocol, checks plans, commits what a ``ToyModel`` says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.core.plan import (
    GroupInfo,
    RankReport,
    SequenceError,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    committed_checksum,
)
from outrider.core.prefix import HashedTokens
from outrider.core.sampling import Sampling
from outrider.core.wire import group_info_to_wire, plan_from_wire, result_to_wire
from outrider.testing.server import StandInServer
from outrider.testing.toy import VOCAB_SIZE, ToyModel
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc


@dataclass
class _Sequence:
    """What the group holds of one sequence: its first ``len(text)`` positions have keys and values."""

    text: HashedTokens
    blocks: list[int]
    sampling: Sampling


@dataclass
class StandInTarget(target_pb2_grpc.TargetServiceServicer, StandInServer):
    """A gRPC server of ``TargetService``; use it as an async context manager.

    Attributes:
        step_s: time that a step takes.
        nan_prompts: sequences whose text begins with one of these fail with INVALID_LOGITS once they sample.
        faults: what was wrong with plans; empty in a correct run.
        proposals: (proposed, accepted) of each verification that had a proposal.
        samplings: the settings of each sequence, in the order in which they came.
        sent_rows: q rows that arrived.
    """

    model: ToyModel
    fingerprint: str = ""
    epoch: int = 1
    step_s: float = 0.0
    max_model_len: int = 512
    num_blocks: int = 256
    block_size: int = 4
    max_num_batched_tokens: int = 64
    row_invariant: bool = True
    group_id: str = "group-0"
    nan_prompts: tuple[tuple[int, ...], ...] = ()
    faults: list[str] = field(default_factory=list)
    proposals: list[tuple[int, int]] = field(default_factory=list)
    num_steps: int = 0
    num_attached: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    sent_rows: int = 0

    def __post_init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._fail_with: str | None = None
        self._paused = asyncio.Event()
        self._paused.set()

    def _register(self, server: Any) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def stop(self) -> None:
        """Die at once: streams break."""
        self._paused.set()
        await super().stop()

    def fail(self, message: str) -> None:
        """Answer the next plan with a failure of the whole group."""
        self._fail_with = message

    def pause(self) -> None:
        """Answer no plan until ``resume``."""
        self._paused.clear()

    def resume(self) -> None:
        self._paused.set()

    def record(self) -> dict[str, Any]:
        """What it would announce in the registry."""
        return {
            "group_id": self.group_id,
            "epoch": self.epoch,
            "address": self.address,
            "tensor_parallel_size": 1,
            "ranks": [{"rank": 0, "node": "here", "pid": 1}],
            "model": "toy",
            "dtype": "float32",
        }

    def info(self) -> GroupInfo:
        return GroupInfo(
            group_id=self.group_id,
            model="toy",
            tokenizer_fingerprint=self.fingerprint,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tensor_parallel_size=1,
            row_invariant=self.row_invariant,
            dtype="float32",
        )

    async def Steps(  # noqa: N802
        self, requests: AsyncIterator[target_pb2.StepsRequest], context: Any
    ) -> AsyncIterator[target_pb2.StepsResponse]:
        header = common_pb2.Header(epoch=self.epoch)
        async for request in requests:
            if request.header.epoch != self.epoch:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this is epoch {self.epoch}")
            if request.WhichOneof("body") == "attach":
                self._sequences.clear()
                self.num_attached += 1
                yield target_pb2.StepsResponse(header=header, attached=group_info_to_wire(self.info()))
                continue
            await asyncio.sleep(self.step_s)
            await self._paused.wait()
            if self._fail_with is not None:
                failure, self._fail_with = target_pb2.GroupFailure(message=self._fail_with), None
                yield target_pb2.StepsResponse(header=header, failure=failure)
                return
            plan = plan_from_wire(self.epoch, request.plan)
            yield target_pb2.StepsResponse(header=header, result=result_to_wire(self.run(plan)))

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        self.num_steps += 1
        self.batch_sizes.append(len(plan.sequences))
        for seq_id in plan.released:
            if self._sequences.pop(seq_id, None) is None:
                self.faults.append(f"step {plan.step}: released sequence {seq_id} is not known")
        if plan.num_rows > self.max_num_batched_tokens:
            self.faults.append(f"step {plan.step}: {plan.num_rows} rows")
        results = tuple(self._run_sequence(plan.step, sequence) for sequence in plan.sequences)
        held = [block for sequence in self._sequences.values() for block in sequence.blocks]
        if len(held) != len(set(held)):
            self.faults.append(f"step {plan.step}: a block belongs to two sequences")
        checksum = committed_checksum((sequence.seq_id, sequence.kv_len) for sequence in plan.sequences)
        return StepResult(self.epoch, plan.step, results, (RankReport(0, len(self._sequences), checksum),))

    def _run_sequence(self, step: int, plan: SequencePlan) -> SequenceResult:
        fault = self._plan_fault(plan)
        if fault is not None:
            self.faults.append(f"step {step}, sequence {plan.seq_id}: {fault}")
            return SequenceResult(plan.seq_id, plan.generation, error=SequenceError.INVALID_PLAN, error_message=fault)
        sequence = self._sequences[plan.seq_id]
        sequence.text.truncate(plan.kv_len)
        num_text = len(plan.tokens) - plan.num_proposal_tokens
        sequence.text.extend(plan.tokens[:num_text])
        if not plan.logits_rows:
            return SequenceResult(plan.seq_id, plan.generation)
        if any(tuple(sequence.text.tokens[: len(start)]) == start for start in self.nan_prompts):
            return SequenceResult(
                plan.seq_id,
                plan.generation,
                error=SequenceError.INVALID_LOGITS,
                error_message="the target's logits are not finite",
            )
        self.sent_rows += len(plan.draft_rows)
        committed: list[int] = []
        for token in plan.tokens[num_text:]:
            if self._next(sequence) != token:
                break
            committed.append(token)
            sequence.text.extend([token])
        num_accepted = len(committed)
        if plan.num_proposal_tokens:
            self.proposals.append((plan.num_proposal_tokens, num_accepted))
        committed.append(self._next(sequence))
        return SequenceResult(plan.seq_id, plan.generation, num_accepted, tuple(committed))

    def _next(self, sequence: _Sequence) -> int:
        text = sequence.text
        return self.model.next_token(text.hashes[-1], len(text))

    def _plan_fault(self, plan: SequencePlan) -> str | None:
        known = self._sequences.get(plan.seq_id)
        if known is None or plan.sampling is not None:
            if plan.sampling is None:
                return "an unknown sequence without sampling settings"
            if plan.block_keep or plan.kv_len:
                return "a new sequence that keeps blocks or positions"
            self.samplings.append(plan.sampling)
            known = _Sequence(HashedTokens(), [], plan.sampling)
            self._sequences[plan.seq_id] = known
        if plan.kv_len > len(known.text):
            return f"keeps {plan.kv_len} positions of {len(known.text)}"
        if plan.block_keep > len(known.blocks):
            return f"keeps {plan.block_keep} blocks of {len(known.blocks)}"
        known.blocks[plan.block_keep :] = plan.block_append
        if any(not 0 <= block < self.num_blocks for block in plan.block_append):
            return "a block that does not exist"
        end = plan.kv_len + len(plan.tokens)
        if end > len(known.blocks) * self.block_size:
            return f"{end} positions in {len(known.blocks)} blocks"
        if end > self.max_model_len:
            return f"{end} positions in a context of {self.max_model_len}"
        if not plan.tokens or plan.num_proposal_tokens >= len(plan.tokens):
            return "no token but the proposal"
        first = len(plan.tokens) - plan.num_proposal_tokens - 1
        if plan.logits_rows not in ((), tuple(range(first, len(plan.tokens)))):
            return f"wants rows {plan.logits_rows} of {len(plan.tokens)}"
        if plan.draft_rows and len(plan.draft_rows) != plan.num_proposal_tokens:
            return "another number of q rows than of proposed tokens"
        return None

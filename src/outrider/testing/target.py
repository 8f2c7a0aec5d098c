"""A target group without a model: serves the protocol, checks plans, commits what a ``ToyModel`` says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from outrider.controls import needs_text, sampling_fault
from outrider.core.ahead import resolve, undecided
from outrider.core.plan import (
    GroupInfo,
    RankReport,
    SequenceError,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    committed_checksum,
    rows_fault,
)
from outrider.core.prefix import HashedTokens
from outrider.core.sampling import Sampling
from outrider.core.wire import group_info_to_wire, plan_from_wire, result_to_wire
from outrider.grammar import GrammarCompiler, Matcher
from outrider.testing.server import StandInServer
from outrider.testing.toy import EOS, VOCAB_SIZE, ToyModel
from outrider.testing.verdicts import decide, score
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc


@dataclass
class _Sequence:
    """What the group holds of one sequence: its first ``len(text)`` positions have keys and values.

    Attributes:
        blocks: its block table, as it was told last.
        num_valid: positions that others may share: those that were decided before the step that runs.
        num_held: blocks that are certainly its own; those behind them may have been given back untold.
    """

    text: HashedTokens
    blocks: list[int]
    sampling: Sampling
    matcher: Matcher | None = None
    num_valid: int = 0
    num_held: int = 0


@dataclass
class StandInTarget(target_pb2_grpc.TargetServiceServicer, StandInServer):
    """A gRPC server of ``TargetService``; use it as an async context manager.

    Attributes:
        step_s: time that a step takes.
        before_step: called with each plan before it runs, to be waited for.
        model_dir: a folder of ``write_toy_model``, for requests with grammars.
        nan_prompts: sequences whose text begins with one of these fail with INVALID_LOGITS once they sample.
        faults: what was wrong with plans; empty in a correct run.
        proposals: (proposed, accepted) of each verification that had a proposal.
        samplings: the settings of each sequence, in the order in which they came.
        sent_rows: q rows that arrived.
        num_scored: prompt tokens that were scored.
        num_shared: positions that sequences took over from others' blocks.
        num_planned_ahead: steps that were planned while the one before them ran.
    """

    model: ToyModel
    fingerprint: str = ""
    epoch: int = 1
    step_s: float = 0.0
    before_step: Callable[[StepPlan], Awaitable[None]] | None = None
    max_model_len: int = 512
    num_blocks: int = 256
    block_size: int = 4
    max_num_batched_tokens: int = 64
    row_invariant: bool = True
    group_id: str = "group-0"
    model_dir: Path | None = None
    nan_prompts: tuple[tuple[int, ...], ...] = ()
    faults: list[str] = field(default_factory=list)
    proposals: list[tuple[int, int]] = field(default_factory=list)
    num_steps: int = 0
    num_attached: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    sent_rows: int = 0
    num_scored: int = 0
    num_shared: int = 0
    num_planned_ahead: int = 0

    def __post_init__(self) -> None:
        self._slots: dict[int, list[int]] = {}  # block -> the tokens whose keys and values it holds
        self._sequences: dict[int, _Sequence] = {}
        self._last: tuple[StepPlan, tuple[SequenceResult, ...]] | None = None  # for plans that were made ahead
        self._fail_with: str | None = None
        self._paused = asyncio.Event()
        self._paused.set()
        self._num_granted = 0  # plans that are answered although it is paused

    def _register(self, server: Any) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def stop(self) -> None:
        """Die at once: streams break."""
        self._paused.set()
        await super().stop()

    def fail(self, message: str) -> None:
        """Answer the next plan with a failure of the whole group."""
        self._fail_with = message

    def pause(self, after: int = 0) -> None:
        """Answer ``after`` further plans, and none then until ``resume``."""
        self._num_granted = after
        self._paused.clear()

    def resume(self) -> None:
        self._num_granted = 0
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
                self._slots.clear()
                self._last = None
                self.num_attached += 1
                yield target_pb2.StepsResponse(header=header, attached=group_info_to_wire(self.info()))
                continue
            await asyncio.sleep(self.step_s)
            if self._num_granted:
                self._num_granted -= 1
            else:
                await self._paused.wait()
            if self._fail_with is not None:
                failure, self._fail_with = target_pb2.GroupFailure(message=self._fail_with), None
                yield target_pb2.StepsResponse(header=header, failure=failure)
                return
            plan = plan_from_wire(self.epoch, request.plan)
            if self.before_step is not None:
                await self.before_step(plan)
            yield target_pb2.StepsResponse(header=header, result=result_to_wire(self.run(plan)))

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        wanted, plan = plan, resolve(plan, *self._last) if self._last is not None else plan
        self.num_steps += 1
        self.num_planned_ahead += wanted.after_step is not None
        self.batch_sizes.append(len(plan.sequences))
        for seq_id in plan.released:
            if self._sequences.pop(seq_id, None) is None:
                self.faults.append(f"step {plan.step}: released sequence {seq_id} is not known")
        if plan.num_rows > self.max_num_batched_tokens:
            self.faults.append(f"step {plan.step}: {plan.num_rows} rows")
        results = tuple(self._run_sequence(plan.step, sequence) for sequence in plan.sequences)
        fault = self._sharing_fault()
        if fault is not None:
            self.faults.append(f"step {plan.step}: {fault}")
        for sequence in plan.sequences:
            self._settle(sequence)
        checksum = committed_checksum((sequence.seq_id, sequence.kv_len) for sequence in plan.sequences)
        self._last = (plan, results)
        dropped, ran = undecided(wanted, plan), iter(results)
        results = tuple(dropped.get(sequence.seq_id) or next(ran) for sequence in wanted.sequences)
        return StepResult(self.epoch, plan.step, results, (RankReport(0, len(self._sequences), checksum),))

    def _run_sequence(self, step: int, plan: SequencePlan) -> SequenceResult:
        result = SequenceResult(plan.seq_id, plan.generation)
        fault = self._plan_fault(plan)
        if fault is not None:
            self.faults.append(f"step {step}, sequence {plan.seq_id}: {fault}")
            return replace(result, error=SequenceError.INVALID_PLAN, error_message=fault)
        sequence = self._sequences[plan.seq_id]
        sampling = sequence.sampling
        sequence.num_valid, sequence.num_held = plan.kv_len, len(sequence.blocks)
        text = sequence.text
        text.truncate(plan.kv_len)
        text.extend(plan.tokens[: plan.num_text_tokens])
        self._write(sequence, plan.kv_len)
        if any(tuple(text.tokens[: len(start)]) == start for start in self.nan_prompts) and plan.verified_rows:
            message = "the target's logits are not finite"
            return replace(result, error=SequenceError.INVALID_LOGITS, error_message=message)
        if plan.scored_tokens:
            self.num_scored += len(plan.scored_tokens)
            scored_text = text.tokens[: plan.kv_len + len(plan.scored_tokens)]
            entries = score(self.model, scored_text, plan.scored_tokens, sampling.prompt_logprobs or 0, sampling.choice)
            result = replace(result, prompt_logprobs=entries)
        if not plan.verified_rows:
            return result
        self.sent_rows += len(plan.draft_rows)
        verdict = decide(self.model, text, plan.proposal, sampling, sequence.matcher)
        if verdict.error is not None:
            return replace(result, error=SequenceError.NOTHING_ALLOWED, error_message=verdict.error)
        text.extend(verdict.committed[:-1])  # rejected tokens leave nothing behind
        self._write(sequence, plan.kv_len)
        if plan.num_proposal_tokens:
            self.proposals.append((plan.num_proposal_tokens, verdict.num_accepted))
        return replace(
            result,
            num_accepted=verdict.num_accepted,
            committed=verdict.committed,
            logprobs=verdict.logprobs,
            num_forced_tokens=verdict.num_forced_tokens,
            num_forced_accepted=verdict.num_forced_accepted,
        )

    def _plan_fault(self, plan: SequencePlan) -> str | None:
        fault = rows_fault(plan)
        if fault is not None:
            return fault
        known = self._sequences.get(plan.seq_id)
        if known is None or plan.sampling is not None:
            if plan.sampling is None:
                return "an unknown sequence without sampling settings"
            if plan.block_keep:
                return "a new sequence that keeps blocks"
            fault = sampling_fault(plan.sampling, VOCAB_SIZE)
            if fault is not None:
                return fault
            text = self._read(plan.block_append, plan.kv_len)
            if text is None:
                return f"starts at {plan.kv_len}, but its blocks do not hold that many positions"
            if plan.prefix_tokens and list(plan.prefix_tokens) != text:
                return "prefix_tokens that are not what the blocks hold"
            if needs_text(plan.sampling) and len(plan.prefix_tokens) != plan.kv_len:
                return f"{len(plan.prefix_tokens)} prefix_tokens for {plan.kv_len} positions"
            self.num_shared += plan.kv_len
            self.samplings.append(plan.sampling)
            known = _Sequence(HashedTokens(text), [], plan.sampling, self._matcher(plan.sampling))
            self._sequences[plan.seq_id] = known
        elif plan.prefix_tokens:
            return "prefix_tokens for a sequence that is known"
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
        if plan.draft_rows and len(plan.draft_rows) != plan.num_proposal_tokens:
            return "another number of q rows than of proposed tokens"
        if plan.scored_tokens and known.sampling.prompt_logprobs is None:
            return "scored tokens, but no prompt_logprobs"
        follow = (*plan.tokens[1:], *plan.scored_tokens[-1:])
        if any(scored != token for scored, token in zip(plan.scored_tokens, follow, strict=False)):
            return "scored tokens that are not those that follow"
        return None

    def _matcher(self, sampling: Sampling) -> Matcher | None:
        if sampling.grammar is None:
            return None
        if self.model_dir is None:
            raise ValueError("a request with a grammar came, but this StandInTarget has no model_dir")
        return GrammarCompiler(self.model_dir, VOCAB_SIZE, [EOS]).matcher(sampling.grammar)

    def _write(self, sequence: _Sequence, start: int) -> None:
        size = self.block_size
        for index in range(start // size, -(-len(sequence.text) // size)):
            self._slots[sequence.blocks[index]] = sequence.text.tokens[index * size : (index + 1) * size]

    def _read(self, blocks: Sequence[int], length: int) -> list[int] | None:
        """The tokens of the first positions of a block table, or None where they were not computed."""
        text = [token for block in blocks[: -(-length // self.block_size)] for token in self._slots.get(block, [])]
        return text[:length] if len(text) >= length else None

    def _settle(self, plan: SequencePlan) -> None:
        """A step of a sequence is over. What it decided others may share, also in steps that the sequence sits out; and
        blocks that held only rejected tokens may be others' before the sequence is told.
        """
        sequence = self._sequences.get(plan.seq_id)
        if sequence is not None:
            sequence.num_valid = len(sequence.text)
            if plan.verified_rows:
                sequence.num_held = min(sequence.num_held, sequence.num_valid // self.block_size + 1)

    def _sharing_fault(self) -> str | None:
        """Sequences may share blocks that are full and committed in each of them, and no others."""
        owners: dict[int, bool] = {}
        for sequence in self._sequences.values():
            for index, block in enumerate(sequence.blocks[: sequence.num_held]):
                is_full = index < sequence.num_valid // self.block_size
                if block in owners and not (is_full and owners[block]):
                    return f"block {block} belongs to two sequences"
                owners[block] = is_full
        return None

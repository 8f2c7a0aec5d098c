"""A toy model in pure Python: a target group that keeps its cache in blocks, drafts that are right or wrong at will,
and a world that drives a scheduler with them.

The toy's next token is a hash of everything before it, as read from its cache, and of the choice. So a wrong position,
a stale slot or a block that two sequences write shows up as wrong text.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from outrider.controls import needs_text
from outrider.core.ahead import resolve, undecided
from outrider.core.logprobs import TokenLogprobs
from outrider.core.plan import (
    GroupInfo,
    RankReport,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    committed_checksum,
)
from outrider.core.prefix import hash_tokens
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.router.drafts import DraftClose, DraftCommit, DraftFacts, DraftOpen
from outrider.router.requests import Committed, FinishReason, NewRequest
from outrider.router.scheduler import Scheduler
from outrider.router.settings import SchedulerSettings

VOCAB_SIZE = 23


def next_token(prefix: Sequence[int], choice: int = 0) -> int:
    digest = hashlib.blake2b(bytes(prefix), digest_size=8, person=bytes([choice])).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def continuation(prefix: Sequence[int], count: int, choice: int = 0) -> list[int]:
    text = list(prefix)
    for _ in range(count):
        text.append(next_token(text, choice))
    return text[len(prefix) :]


def logprobs_of(prefix: Sequence[int], token: int, num_top: int) -> TokenLogprobs:
    """The toy's log-probability of a token behind a prefix: a hash of both."""
    number = next_token([*prefix, token])
    return TokenLogprobs(token, -number / 8.0, number + 1, tuple(range(num_top)), (-1.0,) * num_top)


def all_logprobs(text: Sequence[int], start: int, num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """What is reported of ``text[start:]``."""
    if num_top is None:
        return ()
    return tuple(logprobs_of(text[:index], text[index], num_top) for index in range(start, len(text)))


def plain_decode(request: NewRequest, info: GroupInfo) -> tuple[list[int], FinishReason]:
    """What the toy writes for a request when nobody speculates, batches or interrupts."""
    room = min(info.max_model_len, info.num_blocks * info.block_size + 1) - len(request.prompt_tokens)
    room = room if request.max_tokens is None else min(room, request.max_tokens)
    output: list[int] = []
    while True:
        output.append(next_token([*request.prompt_tokens, *output], request.sampling.choice))
        if output[-1] in request.eos_token_ids | request.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == room:
            return output, FinishReason.LENGTH


def group_info(**changes: object) -> GroupInfo:
    facts: dict[str, object] = {
        "group_id": "group",
        "model": "toy",
        "tokenizer_fingerprint": "f",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 64,
        "num_blocks": 64,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "tensor_parallel_size": 1,
        "row_invariant": True,
        "dtype": "float32",
    }
    return GroupInfo(**{**facts, **changes})  # type: ignore[arg-type]


@dataclass
class _Sequence:
    generation: int
    sampling: Sampling
    table: list[int] = field(default_factory=list)
    kv_len: int = 0  # what the next plan must say


class ToyGroup:
    """Replays plans as a rank would, and checks each against the documented semantics."""

    def __init__(self, info: GroupInfo) -> None:
        self.info = info
        self.sequences: dict[int, _Sequence] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (position, token)
        self.used_ids: set[int] = set()
        self.num_shared_positions = 0  # that sequences did not compute themselves
        self.most_scored = 0  # scored rows of one sequence in one step
        self.last: tuple[StepPlan, tuple[SequenceResult, ...]] | None = None

    def run(self, wanted: StepPlan) -> StepResult:
        assert wanted.sequences
        plan = resolve(wanted, *self.last) if self.last is not None else wanted
        assert plan.num_rows <= self.info.max_num_batched_tokens
        assert len(plan.sequences) <= self.info.max_num_seqs
        for seq_id in plan.released:
            self.sequences.pop(seq_id, None)
        results = [self._run_sequence(sequence) for sequence in plan.sequences]
        planned = {sequence.seq_id for sequence in plan.sequences}
        assert len(planned) == len(plan.sequences)
        checksum = committed_checksum((sequence.seq_id, sequence.kv_len) for sequence in plan.sequences)
        ranks = (RankReport(0, len(self.sequences), checksum),)
        self.last = (plan, tuple(results))
        results += undecided(wanted, plan).values()
        return StepResult(plan.epoch, plan.step, tuple(results), ranks)

    def _run_sequence(self, plan: SequencePlan) -> SequenceResult:
        sequence = self.sequences.get(plan.seq_id)
        if sequence is None:
            assert plan.seq_id not in self.used_ids, "a released sequence is used again"
            assert plan.sampling is not None
            assert plan.block_keep == 0
            sequence = self.sequences[plan.seq_id] = _Sequence(plan.generation, plan.sampling, kv_len=plan.kv_len)
            self.used_ids.add(plan.seq_id)
            self.num_shared_positions += plan.kv_len
            known = plan.prefix_tokens
        else:
            assert plan.sampling is None
            assert plan.prefix_tokens == ()
            known = None
        assert plan.generation == sequence.generation
        assert plan.kv_len == sequence.kv_len
        assert plan.block_keep <= len(sequence.table)
        sequence.table = [*sequence.table[: plan.block_keep], *plan.block_append]
        assert all(0 <= block < self.info.num_blocks for block in sequence.table)
        if known is not None:
            wanted = self._read(sequence, plan.kv_len) if needs_text(sequence.sampling) else []
            assert list(known) == wanted
        end = plan.kv_len + len(plan.tokens)
        assert end <= min(self.info.max_model_len, len(sequence.table) * self.info.block_size)
        k = plan.num_proposal_tokens
        num_text_rows = len(plan.tokens) - k
        assert num_text_rows >= 1
        assert len(plan.draft_rows) in ((0, k) if sequence.sampling.verifier is Verifier.REJECTION else (0,))
        for position, token in enumerate(plan.tokens, plan.kv_len):
            block, _ = slot = self._slot(sequence, position)
            for other in self.sequences.values():
                valid = -(-other.kv_len // self.info.block_size)
                assert other is sequence or block not in other.table[:valid], (
                    "a block that another one reads is written"
                )
            self.slots[slot] = (position, token)
        sampling, scored = sequence.sampling, len(plan.scored_tokens)
        self.most_scored = max(self.most_scored, scored)
        prompt_logprobs = tuple(
            logprobs_of(self._read(sequence, plan.kv_len + row + 1), token, sampling.prompt_logprobs)
            for row, token in enumerate(plan.scored_tokens)
        )
        if not plan.verified_rows:
            assert k == 0
            assert plan.logits_rows == tuple(range(num_text_rows if scored else 0))
            sequence.kv_len = end
            return SequenceResult(plan.seq_id, plan.generation, prompt_logprobs=prompt_logprobs)
        assert scored in (0, num_text_rows - 1)
        assert plan.logits_rows == tuple(range(0 if scored else num_text_rows - 1, len(plan.tokens)))
        accepted = 0
        committed = []
        for row in plan.verified_rows:
            committed.append(next_token(self._read(sequence, plan.kv_len + row + 1), sampling.choice))
            if row + 1 == len(plan.tokens) or plan.tokens[row + 1] != committed[-1]:
                break
            accepted += 1
        sequence.kv_len = plan.kv_len + num_text_rows + accepted
        text = [*self._read(sequence, sequence.kv_len), committed[-1]]
        logprobs = all_logprobs(text, len(text) - len(committed), sampling.logprobs)
        return SequenceResult(
            plan.seq_id,
            plan.generation,
            accepted,
            tuple(committed),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _slot(self, sequence: _Sequence, position: int) -> tuple[int, int]:
        return sequence.table[position // self.info.block_size], position % self.info.block_size

    def _read(self, sequence: _Sequence, length: int) -> list[int]:
        tokens = []
        for position in range(length):
            written_position, token = self.slots[self._slot(sequence, position)]
            assert written_position == position, "a slot holds another position"
            tokens.append(token)
        return tokens


class ToyDraft:
    """A draft worker's view of its sessions, checked against the hashes it is told."""

    def __init__(self, facts: DraftFacts) -> None:
        self.facts = facts
        self.texts: dict[int, list[int]] = {}
        self.asked: dict[int, int] = {}
        self.choices: dict[int, int] = {}
        self._proposal_ids = itertools.count(1)

    def receive(self, event: DraftOpen | DraftCommit | DraftClose) -> None:
        if isinstance(event, DraftOpen):
            assert event.session_id not in self.texts
            assert event.prefix_hash == hash_tokens(event.tokens)
            self.texts[event.session_id] = list(event.tokens)
            self.asked[event.session_id] = event.num_tokens
            self.choices[event.session_id] = event.sampling.choice
        elif isinstance(event, DraftCommit):
            text = self.texts[event.session_id]
            assert event.base_len <= len(text)
            text[event.base_len :] = event.tokens
            assert event.hash == hash_tokens(text)
            self.asked[event.session_id] = event.num_tokens
        else:
            del self.texts[event.session_id]
            del self.asked[event.session_id]
            return
        assert len(self.texts[event.session_id]) <= self.facts.max_model_len
        assert 0 <= event.num_tokens <= self.facts.max_num_tokens

    def propose(
        self,
        prefix: Sequence[int],
        count: int,
        wrong_from: int | None = None,
        rows: bool = False,
        choice: int = 0,
    ) -> Proposal:
        """The toy's own continuation of ``prefix``, wrong from index ``wrong_from`` on."""
        text = list(prefix)
        for index in range(count):
            right = next_token(text, choice)
            text.append(right if wrong_from is None or index < wrong_from else (right + 1) % VOCAB_SIZE)
        tokens = tuple(text[len(prefix) :])
        row = [SparseRow(np.array([token]), np.array([1.0], np.float32)) for token in tokens]
        return Proposal(
            proposal_id=next(self._proposal_ids),
            base_len=len(prefix),
            base_hash=hash_tokens(prefix),
            tokens=tokens,
            rows=tuple(row) if rows else (),
        )


def choice_name(request_id: str, choice: int) -> str:
    return f"{request_id}/{choice}" if choice else request_id


class World:
    """A scheduler, its group and its drafts; keeps each request's text and checks it as it grows.

    Choice 0 of a request goes by the request's id, choice ``c`` by ``ID/c``.
    """

    def __init__(self, info: GroupInfo | None = None, settings: SchedulerSettings | None = None) -> None:
        self.info = info or group_info()
        self.scheduler = Scheduler(self.info, settings or SchedulerSettings(), epoch=1)
        self.group = ToyGroup(self.info)
        self.drafts: dict[str, ToyDraft] = {}
        self.now = 0.0
        self.results: list[StepResult] = []  # of steps in flight
        self.requests: dict[str, NewRequest] = {}
        self.texts: dict[str, list[int]] = {}
        self.ends: dict[str, Committed] = {}
        self.num_steps = 0
        self.num_ahead = 0

    @property
    def pending(self) -> StepResult | None:
        """The result of the step that runs; set to None, the results of all in flight are lost."""
        return self.results[0] if self.results else None

    @pending.setter
    def pending(self, result: StepResult | None) -> None:
        self.results[:1] = [result] if result is not None else []
        if result is None:
            self.results = []

    def add(self, request_id: str, prompt: Sequence[int], *, generation: int = 1, **changes: object) -> NewRequest:
        sampling = changes.pop("sampling", Sampling(temperature=0.0, verifier=Verifier.GREEDY))
        request = NewRequest(request_id, generation, tuple(prompt), sampling, **changes)  # type: ignore[arg-type]
        self.scheduler.add(request, self.now)
        for choice in range(request.num_choices):
            name = choice_name(request_id, choice)
            own = replace(request.sampling, choice=choice)
            own = own if choice == 0 else replace(own, prompt_logprobs=None)
            self.requests[name] = replace(request, sampling=own)
            self.texts[name] = []
            self.ends.pop(name, None)
        self.deliver()
        return request

    def join(self, draft_id: str, *, max_model_len: int = 64, max_num_tokens: int = 8) -> ToyDraft:
        draft = self.drafts[draft_id] = ToyDraft(DraftFacts(draft_id, "model", max_model_len, max_num_tokens))
        self.scheduler.draft_joined(draft.facts, self.now)
        self.deliver()
        return draft

    def leave(self, draft_id: str) -> None:
        del self.drafts[draft_id]
        self.scheduler.draft_left(draft_id, self.now)
        self.deliver()

    def deliver(self) -> None:
        for event in self.scheduler.draft_events():
            self.drafts[event.draft_id].receive(event)

    def start(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        self.deliver()
        if plan is not None:
            self.num_steps += 1
            self.num_ahead += plan.after_step is not None
            self.results.append(self.group.run(plan))
        return plan

    def finish(self) -> list[Committed]:
        return self.take(self.scheduler.complete(self.results.pop(0), self.now))

    def take(self, committed: Iterable[Committed]) -> list[Committed]:
        committed = list(committed)
        for commit in committed:
            name = choice_name(commit.request_id, commit.choice)
            request = self.requests[name]
            text, sampling = self.texts[name], request.sampling
            assert commit.generation == request.generation
            assert commit.position == commit.base_len == len(request.prompt_tokens) + len(text)
            if commit.tokens and not text:
                assert commit.prompt_logprobs == all_logprobs(request.prompt_tokens, 1, sampling.prompt_logprobs)
            else:
                assert commit.prompt_logprobs == ()
            text.extend(commit.tokens)
            assert text == continuation(request.prompt_tokens, len(text), sampling.choice)
            whole = [*request.prompt_tokens, *text]
            assert commit.logprobs == all_logprobs(whole, commit.position, sampling.logprobs)
            if commit.finish is not None:
                assert name not in self.ends
                assert commit.finish.completion_tokens == len(text)
                self.ends[name] = commit
        self.deliver()
        return committed

    def step(self, seconds: float = 1.0) -> StepPlan | None:
        """One step, or the wait that the scheduler wants instead; near its end the next one, if it can be planned."""
        self.take(self.scheduler.expire(self.now))
        plan = self.start()
        if plan is None and self.pending is None:
            wakeup = self.scheduler.next_wakeup(self.now)
            if wakeup is not None:
                self.now = max(self.now, wakeup)
            return None
        self.now += seconds
        self.start()
        self.finish()
        self.scheduler.check_integrity()
        return plan

    def run_to_end(self, most: int = 1000) -> None:
        for _ in range(most):
            if self.scheduler.next_wakeup(self.now) is None and self.pending is None:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def check_ends(self) -> None:
        """Every request that ran to its own end has the text of plain decoding; nothing is left behind."""
        for request_id, commit in self.ends.items():
            assert commit.finish is not None
            if commit.finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                wanted = plain_decode(self.requests[request_id], self.info)
                assert (self.texts[request_id], commit.finish.reason) == wanted
                stats = commit.finish.speculation
                assert sum(stats.acceptance_histogram) == stats.num_spec_steps
                assert sum(i * n for i, n in enumerate(stats.acceptance_histogram)) == stats.num_accepted_tokens
                assert stats.num_accepted_tokens <= stats.num_draft_tokens
        snapshot = self.scheduler.snapshot()
        assert snapshot.num_waiting == snapshot.num_running == 0
        assert snapshot.num_free_blocks == snapshot.num_blocks
        self.scheduler.check_integrity()


Left = float | None  # seconds of work that something has left when nothing runs beside it


def advance(world: World, step_left: Left, draft_left: Left, *, apart: bool) -> tuple[Left, Left]:
    """Pass the time until a step or a draft's work ends, or the scheduler wants to be asked again.

    Both go on at half their speed while both run, unless the draft is ``apart``.
    """
    speed = 0.5 if step_left is not None and draft_left is not None and not apart else 1.0
    ends = [left / speed for left in (step_left, draft_left) if left is not None]
    if step_left is None:
        wakeup = world.scheduler.next_wakeup(world.now)
        assert wakeup is not None
        ends.append(max(0.0, wakeup - world.now))
    passed = min(ends)
    world.now += passed
    step_left, draft_left = (None if left is None else left - speed * passed for left in (step_left, draft_left))
    return step_left, draft_left


@dataclass(frozen=True)
class Toy:
    """What the tests of this folder take from here (pytest's importlib mode has no imports between test files)."""

    World: type[World] = World
    ToyGroup: type[ToyGroup] = ToyGroup
    group_info = staticmethod(group_info)
    plain_decode = staticmethod(plain_decode)
    continuation = staticmethod(continuation)
    next_token = staticmethod(next_token)
    advance = staticmethod(advance)
    vocab_size: int = VOCAB_SIZE


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy()

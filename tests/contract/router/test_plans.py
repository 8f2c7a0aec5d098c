"""What the scheduler plans, a rank accepts: random traffic through the wire into the rank's own sequence table."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.core import wire
from outrider.core.ahead import resolve
from outrider.core.plan import GroupInfo, RankReport, SequenceResult, StepPlan, StepResult
from outrider.core.prefix import hash_tokens
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.router.drafts import DraftClose, DraftCommit, DraftFacts, DraftOpen
from outrider.router.requests import NewRequest
from outrider.router.scheduler import Scheduler
from outrider.router.settings import SchedulerSettings
from outrider.v1 import target_pb2
from outrider.workers.target.state import Limits, SequenceTable

INFO = GroupInfo("g", "m", "f", 50, 60, 20, 4, 24, 1, True, "float32", 6)
SAMPLINGS = [
    Sampling(temperature=0.0, verifier=Verifier.GREEDY),
    Sampling(verifier=Verifier.REJECTION),
    Sampling(verifier=Verifier.COUPLED),
]


def new_table() -> SequenceTable:
    names = Limits.__dataclass_fields__
    return SequenceTable(Limits(**{name: getattr(INFO, name) for name in names}))


class Traffic:
    """Random requests, proposals, aborts and rebuilds; the group accepts at random."""

    def __init__(self, seed: int, *, ahead: bool = False) -> None:
        self.random = random.Random(seed)
        self.scheduler = Scheduler(INFO, SchedulerSettings(plan_ahead=ahead), epoch=1)
        self.results: list[StepResult] = []  # of steps in flight
        self.last: tuple[StepPlan, tuple[SequenceResult, ...]] | None = None
        self.table = new_table()
        self.texts: dict[int, list[int]] = {}
        self.asked: dict[int, int] = {}
        self.num_plans = self.num_refused = self.num_verified = self.num_rejected = self.num_ended = 0
        self.num_ahead = 0
        if not ahead:
            self.scheduler.draft_joined(DraftFacts("d", "model", 60, 8), 0.0)

    def step(self, now: float) -> None:
        choose = self.random.random()
        if choose < 0.3:
            self.add(f"r{int(now)}", now)
        elif choose < 0.35 and now > 20:
            self.scheduler.abort(f"r{int(now) - self.random.randrange(20)}", "", now)
        elif choose < 0.36:
            self.table = new_table()
            assert self.scheduler.reset(self.scheduler.epoch + 1, INFO) == []
            self.results, self.last = [], None
        self.hear_drafts()
        for session_id, count in self.asked.items():
            if count and self.random.random() < 0.7:
                self.scheduler.draft_proposed("d", session_id, self.proposal(self.texts[session_id], count), now)
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self.results.append(self.run(plan))
        if self.results and (
            len(self.results) == 2 or self.random.random() < 0.5 or not self.scheduler.settings.plan_ahead
        ):
            committed = self.scheduler.complete(self.results.pop(0), now + 0.5)
            self.num_ended += sum(commit.finish is not None for commit in committed)
        self.hear_drafts()
        self.scheduler.check_integrity()

    def add(self, request_id: str, now: float) -> None:
        prompt = tuple(self.random.randrange(50) for _ in range(self.random.randrange(1, 40)))
        max_tokens = self.random.randrange(1, 20)
        request = NewRequest(request_id, 1, prompt, self.random.choice(SAMPLINGS), max_tokens)
        # A number of its own is taken at any load.
        self.scheduler.add(replace(request, num_speculative_tokens=self.random.choice([None, 4])), now)

    def proposal(self, text: list[int], count: int) -> Proposal:
        tokens = tuple(self.random.randrange(50) for _ in range(self.random.randint(1, count)))
        rows = tuple(SparseRow(np.array([t]), np.array([1.0], np.float32)) for t in tokens)
        return Proposal(self.random.randrange(1, 2**60), len(text), hash_tokens(text), tokens, rows=rows)

    def hear_drafts(self) -> None:
        for event in self.scheduler.draft_events():
            if isinstance(event, DraftClose):
                del self.texts[event.session_id], self.asked[event.session_id]
                continue
            if isinstance(event, DraftOpen):
                self.texts[event.session_id] = list(event.tokens)
            elif isinstance(event, DraftCommit):
                self.texts[event.session_id][event.base_len :] = event.tokens
            self.asked[event.session_id] = event.num_tokens

    def run(self, plan: StepPlan) -> StepResult:
        plan = wire.plan_from_wire(
            plan.epoch, target_pb2.StepPlan.FromString(wire.plan_to_wire(plan).SerializeToString())
        )
        self.num_ahead += plan.after_step is not None
        plan = resolve(plan, *self.last) if self.last is not None else plan
        admitted, refused = self.table.apply(plan)
        self.num_plans += 1
        self.num_refused += len(refused)
        results = []
        for sequence in (item.plan for item in admitted):
            committed: tuple[int, ...] = ()
            accepted = 0
            if sequence.logits_rows:
                k = sequence.num_proposal_tokens
                accepted = self.random.randint(0, k)
                proposed = sequence.tokens[len(sequence.tokens) - k :][:accepted]
                committed = (*proposed, self.random.randrange(50))
                self.num_verified += k
                self.num_rejected += k - accepted
            results.append(SequenceResult(sequence.seq_id, sequence.generation, accepted, committed))
        self.last = (plan, tuple(results))
        checksum = self.table.checksum(sequence.seq_id for sequence in plan.sequences)
        report = RankReport(0, len(self.table), checksum)
        return StepResult(plan.epoch, plan.step, tuple(results), (report,))


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_refuses_no_plan(seed: int) -> None:
    traffic = Traffic(seed)
    for turn in range(300):
        traffic.step(float(turn))
    assert traffic.num_refused == 0
    # Without these the run would prove nothing.
    assert traffic.num_plans > 200
    assert traffic.num_ended > 30
    assert traffic.num_rejected > 30
    assert traffic.num_verified - traffic.num_rejected > 30
    assert traffic.scheduler.snapshot().num_preemptions > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_refuses_no_plan_that_was_made_ahead(seed: int) -> None:
    traffic = Traffic(seed, ahead=True)
    for turn in range(400):
        traffic.step(float(turn))
    assert traffic.num_refused == 0
    assert traffic.num_ahead > 50
    assert traffic.num_ended > 30
    assert traffic.scheduler.snapshot().num_preemptions > 0

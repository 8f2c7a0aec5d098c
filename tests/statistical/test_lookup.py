"""Texts that the scheduler writes with n-gram lookup beside a draft model follow the target, under rejection.

Requests run through ``Scheduler`` against a target made of ``models.small_pair`` and the product's kernels; a draft
worker proposes now and then, drawn from its own model with the rows that it was drawn from, and lookup proposes what
the text has said before. Judge and false-alarm rate are those of ``harness``. A planted bug shows what the judge sees:
to hear the drafter whose draw looks better bends the texts (rule: the length of the match decides).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.plan import GroupInfo, SequenceResult, StepPlan, StepResult
from outrider.core.prefix import hash_tokens
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched.data import Chain
from outrider.kernels.batched.verify import verify
from outrider.router import planning
from outrider.router.drafts import DraftClose, DraftFacts, DraftOpen
from outrider.router.hearing import Heard, usable
from outrider.router.requests import NewRequest, Request
from outrider.router.scheduler import Scheduler
from outrider.router.settings import SchedulerSettings

from . import models
from .harness import Outcome, Scenario, Texts, judge

SCENARIO = Scenario("rejection-lookup", "rejection", 3, vocab_size=4, length=6, num_texts=1500, model_seed=21)
INFO = GroupInfo("g", "m", "f", 4, 64, 40_000, 4, 1 << 16, 1, True, "float32", SCENARIO.num_texts)


class World:
    """All texts at once: a target and a draft worker, both of the scenario's pair of models."""

    def __init__(self, verifier: Verifier) -> None:
        settings = SchedulerSettings(
            max_num_seqs=SCENARIO.num_texts, num_speculative_tokens=SCENARIO.num_proposals, lookup_lengths=(1, 2)
        )
        self.scheduler = Scheduler(INFO, settings, epoch=1)
        self.verifier = verifier
        self.target, self.draft = SCENARIO.pair
        self.draft_probs = models.filtered_probs(self.draft.logits, 1.0, 0, 1.0).astype(np.float32)
        self.random = np.random.default_rng(5)
        self.sessions: dict[int, list[int]] = {}  # the text that the draft worker knows
        self.samplings: dict[int, Sampling] = {}
        self.caches: dict[int, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.num_accepted = self.num_rejected = 0

    def run(self) -> Texts:
        self.scheduler.draft_joined(DraftFacts("d", "model", 64, 8), 0.0)
        for index in range(SCENARIO.num_texts):
            sampling = Sampling(seed=index + 7_000_003, verifier=self.verifier)
            request = NewRequest(str(index), 1, models.PROMPT, sampling, max_tokens=SCENARIO.length)
            self.scheduler.add(request, 0.0)
            self.outputs[str(index)] = []
        now = 0.0
        while (wakeup := self.scheduler.next_wakeup(now)) is not None:
            self.hear()
            self.propose(now)
            plan = self.scheduler.schedule(now)
            if plan is None:
                now = max(now, wakeup) + 0.01
                continue
            now += 1.0
            for committed in self.scheduler.complete(self.step(plan), now):
                self.outputs[committed.request_id] += committed.tokens
        self.scheduler.check_integrity()
        return Texts(np.array([self.outputs[str(index)] for index in range(SCENARIO.num_texts)]))

    def hear(self) -> None:
        for event in self.scheduler.draft_events():
            if isinstance(event, DraftOpen):
                self.sessions[event.session_id] = list(event.tokens)
            elif isinstance(event, DraftClose):
                del self.sessions[event.session_id]
            else:
                self.sessions[event.session_id][event.base_len :] = event.tokens

    def propose(self, now: float) -> None:
        """Most sessions propose, each token drawn from the row that goes with it."""
        for session_id, text in self.sessions.items():
            if self.random.random() < 0.3:
                continue
            known, rows = list(text), []
            for _ in range(SCENARIO.num_proposals):
                probs = self.draft_probs[known[-2] * 4 + known[-1]]
                known.append(min(3, int(np.searchsorted(np.cumsum(probs), self.random.random()))))
                rows.append(SparseRow(np.arange(4), probs))
            tokens = tuple(known[len(text) :])
            proposal = Proposal(1, len(text), hash_tokens(text), tokens, rows=tuple(rows))
            self.scheduler.draft_proposed("d", session_id, proposal, now)

    def step(self, plan: StepPlan) -> StepResult:
        chains = []
        for sequence in plan.sequences:
            if sequence.sampling is not None:
                self.samplings[sequence.seq_id], self.caches[sequence.seq_id] = sequence.sampling, []
            text = self.caches[sequence.seq_id]
            text[sequence.kv_len :] = sequence.tokens
            start = sequence.kv_len + sequence.num_text_tokens
            contexts = [text[end - 2] * 4 + text[end - 1] for end in range(start, len(text) + 1)]
            rows = [(torch.from_numpy(row.token_ids), torch.from_numpy(row.probs)) for row in sequence.draft_rows]
            sampling = self.samplings[sequence.seq_id]
            logits = torch.from_numpy(self.target.logits[contexts])
            chains.append(Chain(logits, sampling, start, sequence.proposal, rows))
        results = []
        for sequence, chain, outcome in zip(plan.sequences, chains, verify(chains), strict=True):
            assert outcome.error is None
            accepted = outcome.num_accepted
            self.num_accepted += accepted
            self.num_rejected += accepted < sequence.num_proposal_tokens
            committed = (*chain.draft_tokens[:accepted], outcome.next_token)
            results.append(SequenceResult(sequence.seq_id, sequence.generation, accepted, committed))
        return StepResult(plan.epoch, plan.step, tuple(results))


def check(verifier: Verifier) -> tuple[World, Outcome, str]:
    world = World(verifier)
    report = judge(SCENARIO, world.run())  # acceptance is a mixture here, and not judged
    seen = world.num_accepted and world.num_rejected and world.scheduler.snapshot().num_lookup_accepted
    seen = seen and world.scheduler.snapshot().drafts[0].num_accepted_tokens
    outcome = Outcome.PASSED if report.outcome is Outcome.UNKNOWN and seen else report.outcome
    return world, outcome, str(report)


@pytest.mark.parametrize("verifier", [Verifier.REJECTION, Verifier.COUPLED])
def test_texts_follow_the_target(verifier: Verifier) -> None:
    _, outcome, report = check(verifier)
    assert outcome is Outcome.PASSED, report


def better_looking(request: Request) -> Heard | None:
    """What must not be: the model is heard if its draw is a likely one, lookup otherwise."""
    drawn = usable(request)
    if drawn is not None and drawn.rows[0].probs[drawn.tokens[0]] > 0.4:
        return Heard(drawn, request.proposal_draft)
    proposal = request.lookup.proposal(request.text, 3) if request.lookup is not None else None
    return Heard(proposal, None) if proposal is not None else None


def test_listening_to_the_better_looking_draw_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "heard", better_looking)
    _, outcome, report = check(Verifier.REJECTION)
    assert outcome is Outcome.FAILED, report

"""A draft and a target that share a processor, in simulated time: each runs at half its speed while both do."""

from __future__ import annotations

import pytest

from outrider.router.policy import expected_tokens
from outrider.router.settings import SchedulerSettings

STEP_S = 1.0  # alone
K = 4
ACCEPTANCE = 0.8


class SharedProcessor:
    """One stream, one target and one draft, which needs ``draft_s`` alone for a proposal."""

    def __init__(self, toy, draft_s: float, *, apart: bool = False) -> None:
        self.toy = toy
        self.draft_s = draft_s
        self.apart = apart
        info = toy.group_info(num_blocks=2000, block_size=16, max_model_len=1000, max_num_batched_tokens=256)
        self.world = toy.World(info, SchedulerSettings())
        self.step_left: float | None = None
        self.draft_left: float | None = None
        self.proposal: tuple[int, object] | None = None
        self.world.deliver = self._deliver
        self.world.join("a", max_model_len=1000, max_num_tokens=16)
        self.world.add("r", [1, 7, 7])

    def _deliver(self) -> None:
        draft = self.world.drafts["a"]
        for event in self.world.scheduler.draft_events():
            draft.receive(event)
            text = draft.texts.get(event.session_id)
            if text is None or not draft.asked[event.session_id]:
                continue
            wrong = next(i for i in range(99) if self.toy.next_token([*text[-3:], i, 1]) % 5 == 0)
            proposal = draft.propose(text, draft.asked[event.session_id], wrong_from=wrong)
            self.proposal, self.draft_left = (event.session_id, proposal), self.draft_s  # it begins anew

    def run(self, seconds: float) -> float:
        """Tokens a second."""
        world = self.world
        while world.now < seconds:
            if self.step_left is None and world.start() is not None:
                self.step_left = STEP_S
            self.step_left, self.draft_left = self.toy.advance(world, self.step_left, self.draft_left, apart=self.apart)
            if self.draft_left is not None and self.draft_left <= 1e-9:
                (session_id, proposal), self.draft_left = self.proposal, None
                world.scheduler.draft_proposed("a", session_id, proposal, world.now)
            if self.step_left is not None and self.step_left <= 1e-9:
                self.step_left = None
                world.finish()
        world.scheduler.check_integrity()
        return len(world.texts["r"]) / world.now


@pytest.mark.parametrize("draft_s", [0.2, 0.5, 0.7])
def test_a_draft_on_the_targets_processor_is_waited_for(toy, draft_s: float) -> None:
    """Seen beside a step a proposal takes twice as long, and the step too: as if waiting did not pay."""
    waiting = expected_tokens(K, ACCEPTANCE) / (STEP_S + draft_s)
    assert SharedProcessor(toy, draft_s).run(200) > 0.85 * waiting


@pytest.mark.parametrize("draft_s", [1.5, 4.0])
def test_a_draft_that_is_not_worth_its_time_costs_little(toy, draft_s: float) -> None:
    """It is waited for now and then, to see whether it has become faster."""
    assert SharedProcessor(toy, draft_s, apart=True).run(400) > 0.95 / STEP_S


def test_drafts_are_at_work_from_the_prompt_to_the_proposal(toy) -> None:
    """Steps beside them are not taken for steps alone."""
    shared = SharedProcessor(toy, draft_s=0.5)
    drafts = shared.world.scheduler._books.drafts
    assert not drafts.is_any_at_work
    assert shared.world.start() is not None
    assert drafts.is_any_at_work  # it catches up with the prompt
    shared.step_left = STEP_S
    shared.run(30.0)
    (session,) = drafts.drafts["a"].sessions.values()
    session.expected_since = None
    assert not drafts.is_any_at_work
    session.expected_since = shared.world.now
    assert drafts.is_any_at_work
    session.is_prompt = False  # it fell silent
    assert not drafts.is_any_at_work


def test_a_draft_is_asked_for_what_is_late_where_others_could_start_at_once(toy) -> None:
    """Who waits in the queue holds a step back for a moment only, so nobody may count on being waited for."""
    shared = SharedProcessor(toy, draft_s=0.5)
    shared.run(60.0)
    (session,) = shared.world.scheduler._books.drafts.drafts["a"].sessions.values()
    assert session.is_waited_for
    finish, seen = shared.world.finish, []

    def finish_beside_a_queue() -> object:
        if not seen:
            shared.world.add("other", [2, 7, 7])
        committed = finish()
        seen.append(session.is_waited_for)
        return committed

    shared.world.finish = finish_beside_a_queue
    shared.run(shared.world.now + 3.0)
    assert not seen[0]

"""How long proposals are expected to take."""

from __future__ import annotations

import pytest

from outrider.router.draft_latency import Latencies
from outrider.router.policy import Pace


def test_what_many_sessions_wait_for_says_little_of_one() -> None:
    latencies = Latencies()
    assert latencies.expected(1) == latencies.last == Pace()
    latencies.took(8, 0.8, beside=True)
    assert latencies.expected(7) == Pace(beside_s=0.8, num_beside=1)
    assert latencies.expected(1) == Pace(beside_s=0.8)  # at worst; alone it is hoped to be faster
    latencies.took(1, 0.1, beside=False)
    assert latencies.expected(1) == latencies.last == Pace(alone_s=0.1)
    assert latencies.expected(3) == Pace(alone_s=0.1)
    assert latencies.expected(8).beside_s == pytest.approx(0.8)


def test_who_is_left_alone_does_not_go_on_as_in_company(toy) -> None:
    """Otherwise it would take dozens of rounds to find out that a wait pays again."""
    world = toy.World(toy.group_info(max_model_len=400, num_blocks=800))
    draft = world.join("a", max_model_len=400)
    for index in range(9):
        world.add(str(index), [index, 7], max_tokens=8 if index else 300)
    book = world.scheduler._books.drafts

    def run(delay_s: float) -> bool:
        """One round; whether all its proposals were waited for."""
        for session_id, count in list(draft.asked.items()):
            if count:
                proposal = draft.propose(draft.texts[session_id], count)
                world.now += delay_s / max(1, len(draft.asked))
                world.scheduler.draft_proposed("a", session_id, proposal, world.now)
        plan = world.start()
        assert plan is not None
        world.now += 1.0
        world.finish()
        return all(sequence.num_proposal_tokens for sequence in plan.sequences)

    while len(world.ends) < 8:
        run(3.0)
    (session,) = book.drafts["a"].sessions.values()
    assert session.latency == book.drafts["a"].latency
    assert session.latency.alone_s is None or session.latency.alone_s < 3.0


def test_a_new_session_expects_what_as_many_met(toy) -> None:
    world = toy.World()
    world.join("a")
    draft = world.scheduler._books.drafts.drafts["a"]
    draft.latencies.took(1, 0.1, beside=False)
    draft.latencies.took(2, 0.3, beside=False)
    for count, latency_s in ((1, 0.1), (2, 0.3)):
        world.add(str(count), [1, 7], max_tokens=30)
        for _ in range(4):
            if len(draft.sessions) < count:
                world.step()
        assert list(draft.sessions.values())[count - 1].latency == Pace(alone_s=latency_s)

"""Drafts that are late, dead or scattered in time, in simulated time: nobody waits for them, and they still help.

A step takes one second. A draft's proposal for a commit comes ``delay`` seconds after it; about four of five proposed
tokens are right.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

import pytest

from outrider.core.sampling import Sampling, Verifier
from outrider.router.drafts import EvictionReason
from outrider.router.settings import SchedulerSettings

STEP_S = 1.0


class Simulation:
    """Requests, a target and drafts on a simulated clock."""

    def __init__(self, toy, delays: dict[str, float], num_streams: int = 16, jitter: float = 0.0) -> None:
        self.toy = toy
        self.delays = delays
        self.jitter = jitter
        info = toy.group_info(num_blocks=2000, block_size=16, max_model_len=1000, max_num_batched_tokens=256)
        self.world = toy.World(info, SchedulerSettings())
        self.events: list[tuple[float, int, str, object]] = []
        self.order = itertools.count()
        self.drafted_by: dict[str, str] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.num_held = 0
        self.world.deliver = self._deliver
        for draft_id in delays:
            self.world.join(draft_id, max_model_len=1000, max_num_tokens=16)
        for index in range(num_streams):
            self.world.add(str(index), [index, 7, 7])

    def _deliver(self) -> None:
        world = self.world
        for event in world.scheduler.draft_events():
            draft = world.drafts[event.draft_id]
            draft.receive(event)
            if hasattr(event, "request_id"):
                self.drafted_by[event.request_id] = event.draft_id
            text = draft.texts.get(event.session_id)
            if text is None or not draft.asked[event.session_id]:
                continue
            number = next(self.order)
            wrong = next(i for i in range(99) if self.toy.next_token([*text[-3:], i, 1]) % 5 == 0)
            proposal = draft.propose(text, draft.asked[event.session_id], wrong_from=wrong)
            scatter = 1.0 + self.jitter * (self.toy.next_token([number % 250, 3]) / self.toy.vocab_size)
            at = world.now + self.delays[event.draft_id] * scatter
            heapq.heappush(self.events, (at, number, "proposal", (event.draft_id, event.session_id, proposal)))

    def run(self, seconds: float) -> Simulation:
        """Step whenever the scheduler wants to, as a driver would."""
        world = self.world
        while world.now < seconds:
            if world.pending is None:
                if world.start() is not None:
                    heapq.heappush(self.events, (world.now + STEP_S, next(self.order), "step", None))
                else:
                    self.num_held += 1
                    wakeup = world.scheduler.next_wakeup(world.now)
                    assert wakeup is not None
                    heapq.heappush(self.events, (wakeup, next(self.order), "look", None))
            at, _, kind, what = heapq.heappop(self.events)
            world.now = max(world.now, at)
            if kind == "step":
                world.finish()
            elif kind == "proposal":
                draft_id, session_id, proposal = what
                self.counts[f"{draft_id}: {world.scheduler.draft_proposed(draft_id, session_id, proposal, at)}"] += 1
        world.scheduler.check_integrity()
        return self

    def rates(self, draft_id: str) -> list[float]:
        """Tokens per second of each stream that the draft serves."""
        streams = [request_id for request_id, drafted_by in self.drafted_by.items() if drafted_by == draft_id]
        assert streams
        return [len(self.world.texts[request_id]) / self.world.now for request_id in streams]

    def acceptance(self, draft_id: str) -> float:
        snapshot = next(d for d in self.world.scheduler.snapshot().drafts if d.draft_id == draft_id)
        return snapshot.num_accepted_tokens / max(1, snapshot.num_draft_tokens)


@pytest.mark.parametrize("steps_late", [1, 2, 5])
def test_a_late_draft_still_helps_and_slows_nobody(toy, steps_late: int) -> None:
    fast = {"a": 0.01, "b": 0.01, "c": 0.01}
    before = Simulation(toy, {**fast, "d": 0.01}).run(40)
    after = Simulation(toy, {**fast, "d": steps_late + 0.01}).run(40)
    plain = 1.0 / STEP_S
    for draft_id in fast:
        assert sum(after.rates(draft_id)) >= 0.97 * sum(before.rates(draft_id))
    assert after.acceptance("d") > 0.0
    assert min(after.rates("d")) >= 0.95 * plain
    if steps_late <= 2:
        assert sum(after.rates("d")) > 1.1 * 4 * plain


@pytest.mark.parametrize(("slow_after", "starts_at_once"), [(0.4, True), (0.15, False)])
def test_few_ready_streams_are_held_back_for_many_slow_ones_only_a_little(toy, slow_after, starts_at_once) -> None:
    """Holding the step for the seven others makes more tokens in all, at the cost of the one that is ready."""
    world = toy.World(toy.group_info(max_model_len=200, num_blocks=500))
    drafts = {draft_id: world.join(draft_id, max_model_len=200) for draft_id in "abcdefgh"}
    for index in range(8):
        world.add(str(index), [index, 7])

    def propose(draft_ids) -> None:
        for draft_id in draft_ids:
            for session_id, count in drafts[draft_id].asked.items():
                proposal = drafts[draft_id].propose(drafts[draft_id].texts[session_id], count)
                assert world.scheduler.draft_proposed(draft_id, session_id, proposal, world.now) is None

    for _ in range(6):  # the scheduler learns how long each draft takes
        assert world.start() is not None
        world.now += 1.0
        world.finish()
        over_at = world.now
        world.now = over_at + 0.01
        propose("a")
        world.now = over_at + slow_after
        propose("bcdefgh")
    assert world.start() is not None
    world.now += 1.0
    over_at = world.now
    world.finish()
    world.now += 0.01
    propose("a")
    assert (world.start() is not None) == starts_at_once
    if not starts_at_once:
        assert over_at + slow_after < world.scheduler.next_wakeup(world.now) <= over_at + 0.2 + 1e-9
        propose("bcdefgh")
        assert world.start() is not None


def test_a_fast_draft_is_waited_for(toy) -> None:
    """Steps start when the proposals are there: without a hold each would start with none or one of them."""
    simulation = Simulation(toy, {"a": 0.02}).run(30)
    assert simulation.num_held > 0
    assert min(simulation.rates("a")) > 1.8
    assert simulation.counts["a: None"] > 0.9 * sum(simulation.counts.values())


def test_scattered_arrivals_share_a_step(toy) -> None:
    simulation = Simulation(toy, {"a": 0.05}, jitter=1.0).run(30)
    assert min(simulation.rates("a")) > 1.6


def test_one_stream_waits_for_its_own_draft_as_long_as_that_pays(toy) -> None:
    plain = 1.0
    assert Simulation(toy, {"a": 0.5}, num_streams=1).run(50).rates("a")[0] > 1.2 * plain
    assert Simulation(toy, {"a": 3.0}, num_streams=1).run(50).rates("a")[0] >= 0.95 * plain


@pytest.mark.parametrize(("verifier", "sits_out"), [(Verifier.REJECTION, True), (Verifier.COUPLED, False)])
def test_only_a_request_whose_late_proposals_never_fit_sits_out_a_step_of_others(toy, verifier, sits_out: bool) -> None:
    """Its proposal comes in the middle of a step that another request runs anyway.

    Under rejection, a proposal that comes while the request's own token is drawn begins with another one.
    """
    world = toy.World(toy.group_info(max_model_len=200, num_blocks=500))
    draft = world.join("a", max_model_len=200)
    world.add("alone", [1, 7], num_speculative_tokens=0)
    world.add("drafted", [2, 7], sampling=Sampling(temperature=1.0, verifier=verifier))
    sizes = []
    for _ in range(12):
        plan = world.start()
        assert plan is not None
        sizes.append(len(plan.sequences))
        world.now += 0.5
        for session_id, count in draft.asked.items():
            if count:  # whatever it was asked for is there half a step later
                wrong_from = 0 if sits_out and sizes[-1] == 2 else None
                proposal = draft.propose(draft.texts[session_id], count, wrong_from=wrong_from)
                world.scheduler.draft_proposed("a", session_id, proposal, world.now)
        world.now += 0.5
        world.finish()
    assert (1 in sizes) == sits_out
    assert all(size == 2 for first, size in itertools.pairwise(sizes) if first == 1)  # never twice in a row
    assert len(world.texts["alone"]) == 12  # which costs the other nothing


def test_a_draft_that_falls_silent_costs_a_bounded_wait(toy) -> None:
    simulation = Simulation(toy, {"a": 0.1}, num_streams=4).run(30)
    simulation.delays["a"] = 1e9
    tokens, started = sum(map(len, simulation.world.texts.values())), simulation.world.now
    simulation.run(60)
    gained = sum(map(len, simulation.world.texts.values())) - tokens
    # Plain decoding, less one wait of at most twice the predicted time and the step that was running.
    assert gained >= 4 * (simulation.world.now - started - 2)


def test_a_draft_that_becomes_slow_is_learned(toy) -> None:
    simulation = Simulation(toy, {"a": 0.1}, num_streams=4).run(30)
    simulation.delays["a"] = 4.0
    tokens, started = sum(map(len, simulation.world.texts.values())), simulation.world.now
    simulation.run(70)
    assert sum(map(len, simulation.world.texts.values())) - tokens >= 4 * 0.95 * (simulation.world.now - started - 2)


def test_a_dead_draft_is_replaced_by_another(toy) -> None:
    world = toy.World()
    world.join("a")
    world.add("r", [1, 2], max_tokens=20)
    world.step()
    assert len(world.drafts["a"].texts) == 1
    world.leave("a")
    other = world.join("b")
    assert list(other.texts.values()) == [[1, 2, *world.texts["r"]]]
    world.run_to_end()
    world.check_ends()


def test_an_evicted_session_is_opened_again_after_ever_longer_pauses(toy) -> None:
    world = toy.World()
    draft = world.join("a")
    world.add("r", [1, 2], max_tokens=60)
    world.step(0.01)
    opened = []
    for _ in range(3):
        (session_id,) = draft.texts
        draft.texts.clear()
        world.scheduler.draft_evicted("a", session_id, EvictionReason.NO_MEMORY, world.now)
        evicted_at = world.now
        while not draft.texts:
            world.step(0.1)
        opened.append(world.now - evicted_at)
    assert opened == sorted(opened)
    assert 0.25 <= opened[0] <= 0.5
    assert 1.0 <= opened[2] <= 1.3


def test_a_text_that_outgrew_a_drafts_context_does_not_go_back_to_it(toy) -> None:
    world = toy.World()
    draft = world.join("a")
    world.add("r", [1, 2], max_tokens=60)
    world.step()
    (session_id,) = draft.texts
    draft.texts.clear()
    world.scheduler.draft_evicted("a", session_id, EvictionReason.CONTEXT_FULL, world.now)
    for _ in range(20):
        world.step(100.0)
    assert draft.texts == {}
    assert len(world.texts["r"]) == 21


def test_sessions_spread_over_drafts(toy) -> None:
    world = toy.World()
    for draft_id in "abc":
        world.join(draft_id)
    for request_id in range(7):
        world.add(str(request_id), [1], max_tokens=30)
    world.step()
    assert sorted(len(draft.texts) for draft in world.drafts.values()) == [2, 2, 3]

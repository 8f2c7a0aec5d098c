"""Streams in company, in simulated time: speculation gives way where plain decoding of the whole batch is faster.

Times are in passes of the target over one row. A pass takes hardly longer up to sixteen rows and then grows with them;
a draft's passes are shorter and grow with rows too. Where target and draft share processors, each runs at half its
speed while both do. Every stream writes ``LENGTH`` tokens, and another takes its place.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

import pytest

from outrider.core.prefix import hash_tokens
from outrider.core.proposal import Proposal
from outrider.router.drafts import DraftClose, DraftOpen
from outrider.router.settings import SchedulerSettings

PROMPT, LENGTH = 12, 48
CHUNK = 32  # rows of a text that a draft takes in at once
PLAIN = SchedulerSettings(num_speculative_tokens=0)
GIVES_WAY = SchedulerSettings()
STUBBORN = SchedulerSettings(adapt_to_load=False)


def pass_s(rows: int) -> float:
    return 1.0 + 0.015 * min(rows, 16) + 0.04 * max(0, rows - 16)


def flat_pass_s(rows: int) -> float:
    return 1.0


def draft_pass_s(rows: int) -> float:
    return 0.25 + 0.02 * rows


def quick_draft_pass_s(rows: int) -> float:
    return 0.02


@dataclass
class Session:
    """What a draft knows of a text. Tokens that it drafted stay as long as what is committed agrees with them."""

    text: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_known: int = 0
    is_due: bool = False

    def commit(self, text: list[int], num_tokens: int) -> None:
        before, now = [*self.text, *self.drafted], text
        agreed = next(
            (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now))
        )
        self.drafted = before[len(text) :] if agreed == len(text) else []
        self.num_known = min(self.num_known, agreed)
        self.text, self.num_tokens, self.is_due = text, num_tokens, num_tokens > 0

    @property
    def num_rows(self) -> int:
        """Of the next pass: what it does not know yet. Where a token is to be drafted there is always one."""
        known = len(self.text) + len(self.drafted)
        if self.is_due and len(self.drafted) < self.num_tokens:
            return min(CHUNK, known - self.num_known)
        return min(CHUNK, max(0, len(self.text) - 1 - self.num_known))


class Machine:
    """One target, and one draft for all streams unless there is none."""

    def __init__(
        self,
        toy,
        settings,
        num_streams,
        *,
        pass_s=pass_s,
        draft_pass_s=draft_pass_s,
        apart=False,
        draft=True,
        prompt=PROMPT,
        length=LENGTH,
        spread=0,
    ):
        self.toy, self.pass_s, self.draft_pass_s, self.apart = toy, pass_s, draft_pass_s, apart
        self.prompt, self.length, self.spread = prompt, length, spread  # texts are shorter by up to so many tokens
        info = toy.group_info(num_blocks=2000, block_size=16, max_model_len=200, max_num_batched_tokens=256)
        self.world = toy.World(info, settings)
        self.num_streams, self.numbers = num_streams, itertools.count()
        self.num_wrong = 5  # of 23 proposed tokens
        self.sessions: dict[int, Session] = {}
        self.step_left: float | None = None
        self.pass_left: float | None = None
        self.rows: dict[int, int] = {}  # of the draft's pass
        self.num_passes = self.num_tokens = 0
        self.levels: list[str] = []
        self.num_mixed = 0  # steps with rows of prompts
        self.begun: dict[str, float] = {}
        self.first_tokens: list[float] = []  # seconds that they took
        self.opened: list[float] = []  # seconds after its arrival that a draft was told of a request
        self.world.deliver = self._deliver
        if draft:
            self.world.join("a", max_model_len=200, max_num_tokens=16)

    def _deliver(self) -> None:
        draft = self.world.drafts.get("a")
        for event in self.world.scheduler.draft_events():
            draft.receive(event)  # which checks what it is told
            if isinstance(event, DraftClose):
                del self.sessions[event.session_id]
                continue
            if isinstance(event, DraftOpen):
                self.opened.append(self.world.now - self.begun[event.request_id])
            session = self.sessions.setdefault(event.session_id, Session())
            session.commit(list(draft.texts[event.session_id]), event.num_tokens)
            self._propose_if_ready(event.session_id, session)

    def _draft(self) -> None:
        """Begin a pass over whatever is to be done."""
        if self.pass_left is None:
            self.rows = {i: session.num_rows for i, session in self.sessions.items() if session.num_rows}
            if self.rows:
                self.pass_left, self.num_passes = self.draft_pass_s(sum(self.rows.values())), self.num_passes + 1

    def _drafted(self) -> None:
        self.pass_left = None
        for session_id, rows in self.rows.items():
            session = self.sessions.get(session_id)
            if session is None:
                continue
            text = [*session.text, *session.drafted]
            session.num_known = min(session.num_known + rows, len(text))
            if session.is_due and session.num_known == len(text):
                right = self.toy.next_token(text)
                is_wrong = self.toy.next_token([*text[-3:], 1]) < self.num_wrong
                session.drafted.append((right + is_wrong) % self.toy.vocab_size)
            self._propose_if_ready(session_id, session)

    def _propose_if_ready(self, session_id: int, session: Session) -> None:
        if not session.is_due or len(session.drafted) < session.num_tokens:
            return
        session.is_due = False
        tokens, text = tuple(session.drafted[: session.num_tokens]), session.text
        proposal = Proposal(next(self.numbers), len(text), hash_tokens(text), tokens)
        self.world.scheduler.draft_proposed("a", session_id, proposal, self.world.now)

    def _refill(self) -> None:
        running = sum(name not in self.world.ends for name in self.world.requests)
        for _ in range(self.num_streams - running):
            number = next(self.numbers)
            self.begun[str(number)] = self.world.now
            prompt = [number % 23, number // 23 % 23] + [7] * (self.prompt - 2)
            self.world.add(str(number), prompt, max_tokens=self.length - number * 7 % 11 * self.spread // 10)

    def run(self, seconds: float) -> float:
        """Tokens a second."""
        world, began, before = self.world, self.world.now, self.num_tokens
        while world.now < began + seconds:
            self._refill()
            if self.step_left is None and (plan := world.start()) is not None:
                self.step_left = self.pass_s(plan.num_rows)
                self.num_mixed += any(part.num_text_tokens > 1 for part in plan.sequences)
                self.levels.append(world.scheduler.snapshot().speculation.level)
            self._draft()
            self.step_left, self.pass_left = self.toy.advance(world, self.step_left, self.pass_left, apart=self.apart)
            if self.pass_left is not None and self.pass_left <= 1e-9:
                self._drafted()
            if self.step_left is not None and self.step_left <= 1e-9:
                self.step_left = None
                committed = world.finish()
                self.num_tokens += sum(len(commit.tokens) for commit in committed)
                first = [commit for commit in committed if commit.position == self.prompt]
                self.first_tokens += [world.now - self.begun[commit.request_id] for commit in first]
        world.scheduler.check_integrity()
        return (self.num_tokens - before) / (world.now - began)


def test_eight_streams_that_share_processors_are_about_as_fast_as_without_a_draft(toy) -> None:
    plain = Machine(toy, PLAIN, 8).run(1200)
    assert Machine(toy, STUBBORN, 8).run(300) < 0.85 * plain
    company = Machine(toy, GIVES_WAY, 8)
    assert company.run(1200) > 0.97 * plain
    assert company.run(1200) > 0.97 * plain


def test_while_plain_decoding_is_faster_drafts_rest_and_catch_up_later(toy) -> None:
    company = Machine(toy, GIVES_WAY, 8)
    company.run(600)
    began, most, rests = company.num_passes, 0, 0
    steps, level = len(company.levels), company.world.scheduler.snapshot().speculation
    assert level.is_paused
    while level.level == "plain" and len(company.levels) < steps + 100:
        company.run(1.0)
        level = company.world.scheduler.snapshot().speculation
        rests, most = rests + 1, max(most, company.num_passes - began)
    assert rests > 50
    assert most <= 2  # that of new requests is not even told of
    assert not company.world.scheduler._books.drafts.is_any_at_work
    sessions = company.world.scheduler._books.drafts.drafts["a"].sessions.values()
    assert all(session.request.level == 0 for session in sessions)


def test_one_stream_keeps_its_gain(toy) -> None:
    plain, stubborn, company = (Machine(toy, settings, 1).run(400) for settings in (PLAIN, STUBBORN, GIVES_WAY))
    assert company == stubborn > 1.3 * plain


def test_a_draft_elsewhere_and_rows_that_cost_nothing_keep_their_full_gain(toy) -> None:
    costs = {"pass_s": flat_pass_s, "draft_pass_s": quick_draft_pass_s, "apart": True}
    plain, stubborn, company = (Machine(toy, s, 8, **costs).run(200) for s in (PLAIN, STUBBORN, GIVES_WAY))
    assert company > 0.97 * stubborn > 2.0 * plain


def test_a_draft_elsewhere_beside_a_target_whose_rows_cost_gives_way_too(toy) -> None:
    costs = {"draft_pass_s": quick_draft_pass_s, "apart": True, "pass_s": lambda rows: 0.2 + 0.1 * rows}
    plain, stubborn, company = (Machine(toy, s, 8, **costs).run(500) for s in (PLAIN, STUBBORN, GIVES_WAY))
    assert stubborn < 0.9 * plain
    assert company > 0.96 * plain


def test_texts_that_become_hard_or_easy_are_followed(toy) -> None:
    """Where proposals are good eight streams gain by them, where they are bad they lose."""
    costs = {"draft_pass_s": quick_draft_pass_s, "apart": True, "pass_s": lambda rows: 1.0 + 0.03 * rows}
    plain = Machine(toy, PLAIN, 8, **costs).run(300)
    company = Machine(toy, GIVES_WAY, 8, **costs)
    company.num_wrong = 2
    assert company.run(200) > 1.3 * plain
    company.num_wrong = 20
    company.run(250)
    assert company.run(400) > 0.97 * plain
    company.num_wrong = 2
    company.run(900)
    assert company.run(200) > 1.3 * plain


def test_requests_that_name_a_number_keep_it(toy) -> None:
    company = Machine(toy, GIVES_WAY, 8)
    company.run(400)
    world = company.world
    assert world.scheduler.snapshot().speculation.is_paused
    for name in [name for name in world.requests if name not in world.ends]:
        world.take(world.scheduler.abort(name, "no longer wanted", world.now))
    for index in range(8):
        company.begun[f"own {index}"] = world.now
        world.add(f"own {index}", [index, 1, 2], max_tokens=100, num_speculative_tokens=3)
    company.num_streams = 0
    company.run(60)
    stats = [request.stats for request in world.scheduler._books.requests]
    assert len(stats) == 8
    assert all(one.num_draft_tokens > 12 and one.num_accepted_tokens > 0 for one in stats)


def test_a_draft_that_comes_back_does_not_make_the_load_forget(toy) -> None:
    company = Machine(toy, GIVES_WAY, 8)
    company.run(400)
    world = company.world
    assert world.scheduler.snapshot().speculation.is_paused
    passes = company.num_passes
    for _ in range(5):
        world.leave("a")
        company.sessions.clear()
        company.pass_left = None
        company.run(5)
        world.join("a", max_model_len=200, max_num_tokens=16)
        assert world.scheduler.snapshot().speculation.level == "plain"
        company.run(5)
    assert company.num_passes == passes
    before = world.scheduler.snapshot().speculation.goodput["plain"]
    world.leave("a")
    company.sessions.clear()
    world.join("a", max_model_len=199, max_num_tokens=16)  # it may be another one: nobody knows how well it does
    told = world.scheduler.snapshot().speculation
    assert told.level == "full"
    assert told.goodput == {"plain": before}


SHORT = {"prompt": 6, "length": 10, "spread": 7}


def test_a_server_whose_steps_nearly_all_enter_prompts_learns_too(toy) -> None:
    """Texts are so short that some stream begins in nearly every step."""
    plain, stubborn, company = (Machine(toy, s, 16, **SHORT) for s in (PLAIN, STUBBORN, GIVES_WAY))
    most = plain.run(300)
    assert plain.num_mixed > 0.9 * len(plain.levels)
    assert stubborn.run(150) < 0.9 * most
    assert company.run(150) > 0.75 * most
    assert company.run(450) > 0.97 * most


def test_a_busy_server_keeps_a_gain_that_is_there(toy) -> None:
    costs = {"pass_s": flat_pass_s, "draft_pass_s": quick_draft_pass_s, "apart": True, **SHORT}
    plain, stubborn, company = (Machine(toy, s, 16, **costs) for s in (PLAIN, STUBBORN, GIVES_WAY))
    least, most = plain.run(200), stubborn.run(200)
    assert stubborn.num_mixed > 0.9 * len(stubborn.levels)
    assert company.run(200) > 0.94 * most > 1.2 * least


def test_a_stream_with_a_number_of_its_own_keeps_nobody_from_learning(toy) -> None:
    def speed(settings: SchedulerSettings) -> float:
        company = Machine(toy, settings, 12)
        world, began = company.world, 0.0
        for turn in range(240):
            if all(name in world.ends for name in world.requests if name.startswith("own")):
                company.begun[f"own {turn}"] = world.now
                world.add(f"own {turn}", [turn % 23, 1, 2], max_tokens=150, num_speculative_tokens=3)
            if turn == 80:
                began, company.num_tokens = world.now, 0
            company.run(5.0)
        return company.num_tokens / (world.now - began)

    plain = speed(PLAIN)
    assert speed(STUBBORN) < 0.9 * plain
    assert speed(GIVES_WAY) > 0.96 * plain


def test_lookup_gives_way_where_its_rows_cost_more_than_they_bring(toy) -> None:
    """Texts of the toy repeat nothing, so that short matches are found and are wrong."""
    settings = SchedulerSettings(num_speculative_tokens=8, lookup_lengths=(1, 2))
    costs = {"draft": False, "pass_s": lambda rows: 1.0 + 0.05 * rows}
    plain = Machine(toy, PLAIN, 8, **costs).run(400)
    stubborn = Machine(toy, dataclasses.replace(settings, adapt_to_load=False), 8, **costs).run(400)
    company = Machine(toy, settings, 8, **costs).run(800)
    assert stubborn < 0.85 * plain
    assert company > 0.97 * plain


LONG = 90


def test_the_first_token_does_not_wait_for_a_draft_on_the_same_processors(toy) -> None:
    """Draft and target take in the same prompt: at once each would be slowed by the other."""
    plain, company = Machine(toy, PLAIN, 1, prompt=LONG), Machine(toy, GIVES_WAY, 1, prompt=LONG)
    gain = company.run(400) / plain.run(400)
    together, then = company.first_tokens[0], company.first_tokens[2:]  # two tell that steps are slowed
    assert together > 1.2 * plain.first_tokens[0]
    assert len(then) > 5
    assert max(then) == pytest.approx(plain.first_tokens[0])
    assert min(company.opened[2:]) == pytest.approx(plain.first_tokens[0])
    assert gain > 1.15


def test_a_draft_elsewhere_takes_in_the_prompt_at_once(toy) -> None:
    company = Machine(toy, GIVES_WAY, 1, prompt=LONG, apart=True)
    company.run(300)
    assert len(company.opened) > 5
    assert max(company.opened) == 0.0


def together(company: Machine, name: str, count: int, max_tokens: int, **changes) -> float:
    """Tokens a second of so many requests that come at once."""
    world = company.world
    began = world.now
    for index in range(count):
        request_id = f"{name} {index}"
        company.begun[request_id] = began
        prompt = [index, len(name), 2] + [7] * (company.prompt - 3)  # nothing of it is found in the cache
        world.add(request_id, prompt, max_tokens=max_tokens, **changes)
    while len(world.ends) < len(world.requests):
        company.run(0.1)
    return count * max_tokens / (world.now - began)


def test_a_server_that_has_served_single_streams_meets_eight(toy) -> None:
    """That drafts share its processors is known by then, so they do not take in eight prompts to no avail."""
    company = Machine(toy, GIVES_WAY, 0, prompt=40)
    alone = together(company, "not drafted", 1, 24, num_speculative_tokens=0)
    for name in ("one", "once more"):
        together(company, name, 1, 24)
    plain = together(company, "plain", 8, 96, num_speculative_tokens=0)
    passes = company.num_passes
    assert together(company, "governed", 8, 96) > 0.97 * plain
    assert company.num_passes - passes < 10
    assert together(company, "one again", 1, 100) > 1.2 * alone

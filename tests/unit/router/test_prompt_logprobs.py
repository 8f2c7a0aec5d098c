"""Log-probabilities: one for each token of the prompt, whatever the chunks, and cut with the text behind it.

``World.take`` compares every entry with the toy's.
"""

from __future__ import annotations

import dataclasses

import pytest

from outrider.core.errors import GroupError
from outrider.core.logprobs import TokenLogprobs
from outrider.core.sampling import Sampling
from outrider.router import batch
from outrider.router.scheduler import Scheduler
from outrider.router.settings import SchedulerSettings

PROMPT = [(7 * index) % 23 for index in range(30)]
SCORING = Sampling(seed=3, prompt_logprobs=2, logprobs=1)


def scored(plan) -> list[int]:
    return [len(sequence.scored_tokens) for sequence in plan.sequences]


@pytest.mark.parametrize("budget", [1, 4, 7, 64])
@pytest.mark.parametrize("most_scored", [1, 3, 128])
@pytest.mark.parametrize("length", [1, 2, 3, 30])
def test_chunks_do_not_matter(toy, monkeypatch, budget: int, most_scored: int, length: int) -> None:
    monkeypatch.setattr(batch, "MAX_SCORED_ROWS", most_scored)
    world = toy.World(toy.group_info(max_num_batched_tokens=budget))
    world.add("r", PROMPT[:length], max_tokens=3, sampling=SCORING)
    total = 0
    while "r" not in world.ends:
        total += sum(scored(world.step()))
    assert total == length - 1
    assert world.group.most_scored <= most_scored
    world.check_ends()


def test_a_step_scores_a_bounded_number_of_rows(toy, monkeypatch) -> None:
    """Over all its requests; the rows that are left go to prompts that are not scored."""
    monkeypatch.setattr(batch, "MAX_SCORED_ROWS", 8)
    world = toy.World(toy.group_info(max_num_batched_tokens=20))
    world.add("a", PROMPT[:14], max_tokens=2, sampling=SCORING)
    world.add("b", PROMPT[:14], max_tokens=2, sampling=SCORING)
    world.add("c", PROMPT[:14], max_tokens=2)
    steps = []
    while len(world.ends) < 3:
        plan = world.step()
        steps.append((scored(plan), [len(sequence.tokens) for sequence in plan.sequences]))
    # While a takes all that may be scored, b is not begun, and c goes ahead of it.
    assert steps[:3] == [([8, 0], [8, 12]), ([5, 0, 3], [6, 2, 3]), ([0, 0, 8], [1, 1, 8])]
    assert max(sum(counts) for counts, _ in steps) == 8
    world.check_ends()


def test_a_proposal_is_verified_behind_scored_rows(toy) -> None:
    world = toy.World()
    proposal = world.join("d").propose(PROMPT, 4)
    world.add("r", PROMPT, max_tokens=9, sampling=SCORING)
    assert world.scheduler.offer("r", 1, proposal, "", world.now) is None
    (sequence,) = world.step().sequences
    assert (len(sequence.scored_tokens), sequence.num_proposal_tokens) == (29, 4)
    assert sequence.logits_rows == tuple(range(34))
    assert len(world.texts["r"]) == 5
    world.run_to_end()
    world.check_ends()


@pytest.mark.parametrize("steps", range(6))
def test_what_is_known_is_not_scored_again_after_a_rebuild(toy, monkeypatch, steps: int) -> None:
    monkeypatch.setattr(batch, "MAX_SCORED_ROWS", 7)
    world = toy.World()
    world.add("r", PROMPT, max_tokens=4, sampling=SCORING)
    total = sum(sum(scored(world.step())) for _ in range(steps))
    world.start()
    world.pending = None  # the answer to this one is lost
    world.group = toy.ToyGroup(world.info)
    world.scheduler.reset(2, world.info)
    while "r" not in world.ends:
        total += sum(scored(world.step()))
    assert total == len(PROMPT) - 1
    world.check_ends()


def test_what_is_known_is_not_scored_again_after_a_preemption(toy, monkeypatch) -> None:
    monkeypatch.setattr(batch, "MAX_SCORED_ROWS", 2)
    world = toy.World(toy.group_info(num_blocks=7))
    world.add("a", [1, 2, 3], max_tokens=20)
    world.add("b", PROMPT[:20], max_tokens=3, sampling=SCORING)
    total = 0
    while world.scheduler.snapshot().num_preemptions == 0:
        total += sum(scored(world.step()))
    assert 0 < total < 19
    while len(world.ends) < 2:
        total += sum(scored(world.step()))
    assert total == 19
    world.check_ends()


def test_sharing_does_not_skip_them(toy) -> None:
    """Choice 0 computes and reports them, once; the others share its prompt all the same."""
    world = toy.World()
    world.add("r", PROMPT, num_choices=3, max_tokens=3, sampling=SCORING)
    assert scored(world.step()) == [29]
    plan = world.step()
    assert scored(plan) == [0, 0, 0]
    assert [sequence.kv_len for sequence in plan.sequences] == [30, 28, 28]
    assert plan.sequences[1].sampling.prompt_logprobs is None
    world.run_to_end()
    world.check_ends()


def test_choice_0_scores_its_prompt_though_others_have_computed_it(toy, monkeypatch) -> None:
    """It was preempted before it had scored all, and a choice that need not score overtook it."""
    monkeypatch.setattr(batch, "MAX_SCORED_ROWS", 3)
    world = toy.World(settings=SchedulerSettings(max_num_seqs=2))
    world.add("r", PROMPT, num_choices=2, max_tokens=2, sampling=SCORING)
    world.step()
    choices = {request.choice: request for request in world.scheduler._requests}
    batcher = world.scheduler._batcher
    batcher._preempt(choices[0])
    batcher.waiting.rotate(1)
    world.step()
    assert choices[1].kv_len == len(PROMPT)
    world.run_to_end()
    world.check_ends()


class HaltAt:
    def __init__(self, index: int) -> None:
        self.left = index + 1

    def feed(self, tokens):
        kept = min(self.left, len(tokens))
        self.left -= kept
        return kept, "halt" if self.left == 0 else None


@pytest.mark.parametrize("end", ["eos", "stop", "length"])
@pytest.mark.parametrize("index", range(7))
def test_e1_e2_e3_they_end_with_the_text(toy, end: str, index: int) -> None:
    """Wherever in a block of accepted tokens: S10 and E1 to E3."""
    world = toy.World()
    if end == "stop":
        world.scheduler = Scheduler(world.info, SchedulerSettings(), epoch=1, make_cutter=lambda new: HaltAt(index))
    draft = world.join("d")
    output = toy.continuation(PROMPT, index + 1)
    eos = frozenset(output[-1:] if end == "eos" and output[-1] not in output[:-1] else [])
    max_tokens = None if end == "stop" or eos else index + 1
    world.add("r", PROMPT, max_tokens=max_tokens, eos_token_ids=eos, sampling=SCORING)
    entries = []
    while "r" not in world.ends:
        for session_id, text in draft.texts.items():
            world.scheduler.draft_proposed("d", session_id, draft.propose(text, 4), world.now)
        if world.start() is not None:
            entries += [entry for commit in world.finish() for entry in commit.logprobs]
    assert [entry.token_id for entry in entries] == world.texts["r"] == output
    assert index < 2 or world.ends["r"].finish.speculation.num_accepted_tokens > 0
    if end != "stop":  # of which the toy's plain decoding knows nothing
        world.check_ends()


@pytest.mark.parametrize("fault", ["none", "few", "other", "prompt", "unasked"])
def test_an_answer_without_them_contradicts_its_plan(toy, fault: str) -> None:
    world = toy.World()
    world.add("r", PROMPT[:3], max_tokens=4, sampling=SCORING if fault != "unasked" else Sampling())
    world.start()
    (good,) = world.pending.sequences
    entry = good.logprobs[0] if good.logprobs else TokenLogprobs(good.committed[0], -1.0, 1)
    changes = {
        "none": {"logprobs": ()},
        "few": {"prompt_logprobs": good.prompt_logprobs[:-1]},
        "other": {"logprobs": (dataclasses.replace(entry, token_id=entry.token_id ^ 1),)},
        "prompt": {"prompt_logprobs": ()},
        "unasked": {"logprobs": (entry,)},
    }[fault]
    bad = dataclasses.replace(world.pending, sequences=(dataclasses.replace(good, **changes),))
    with pytest.raises(GroupError, match="log-probabilities"):
        world.scheduler.complete(bad, world.now)
    world.finish()
    world.run_to_end()
    world.check_ends()

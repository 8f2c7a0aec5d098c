"""A healthy group of one rank, two ranks in shared memory, two ranks as if on two hosts: what it commits and holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.core.plan import SequenceError, SequencePlan, StepPlan
from outrider.core.proposal import SparseRow
from outrider.core.sampling import Sampling, Verifier

GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
COUPLED = Sampling(temperature=0.9, seed=2**63 + 5, verifier=Verifier.COUPLED)
FILTERED = Sampling(temperature=1.1, top_k=40, top_p=0.9, seed=6, verifier=Verifier.COUPLED)
REJECTION = Sampling(temperature=1.0, seed=7, choice=1, verifier=Verifier.REJECTION)
REJECTION_FILTERED = Sampling(temperature=0.7, top_k=30, top_p=0.95, seed=8, verifier=Verifier.REJECTION)
PENALTIES = (("frequency_penalty", 0.8), ("repetition_penalty", 1.3))
CUTS = (("logit_bias", ((5, 2.0), (250, -3.0))), ("min_p", 0.05), ("presence_penalty", 1.0))
SETTINGS = {
    "greedy": GREEDY,
    "coupled": COUPLED,
    "coupled-filtered": FILTERED,
    "rejection": REJECTION,
    "rejection-filtered": REJECTION_FILTERED,
    "penalties": replace(COUPLED, controls=PENALTIES, prompt_len=1),
    "rejection-cuts": replace(REJECTION, controls=CUTS, logprobs=2),
}
NewSequence = Callable[..., Any]
Steps = Any


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(300) for _ in range(length)]


def propose(
    rng: random.Random, oracle: Any, sequence: Any, k: int, truth: list[int]
) -> tuple[tuple[int, ...], tuple[SparseRow, ...]]:
    """A proposal of ``k`` tokens, each right with probability 0.7; under rejection half of them carry q rows."""
    done = len(sequence.tokens) - sequence.prompt_len
    guess = [truth[done + i] if done + i < len(truth) else rng.randrange(300) for i in range(k)]
    tokens = tuple(token if rng.random() < 0.7 else rng.randrange(300) for token in guess)
    if sequence.sampling.verifier is not Verifier.REJECTION or rng.random() < 0.5:
        return tokens, ()
    rows = []
    for token in tokens:
        others = rng.sample([other for other in range(300) if other != token], 5)
        weights = np.array([rng.random() + 0.01 for _ in range(6)])
        rows.append(SparseRow(np.array([token, *others]), (weights / weights.sum()).astype(np.float32)))
    return tokens, tuple(rows)


def kv_of(group: Any, seq_id: int, length: int) -> list[np.ndarray]:
    """Keys and values of a sequence on every rank, layer by layer."""
    return [array for rank in group.ranks for array in rank.call("read_kv", seq_id, length)]


def check_kv(group: Any, steps: Steps, sequence: Any, new_sequence: NewSequence) -> None:
    """The cache of a sequence equals, by bits, one that is computed from its committed tokens in one go."""
    length = sequence.kv_len
    again = new_sequence(sequence.tokens[:length], GREEDY)
    while again.kv_len < length:
        steps.run((again, again.plan(chunk=40)))
    held, rebuilt = kv_of(group, sequence.seq_id, length), kv_of(group, again.seq_id, length)
    assert len(held) == len(rebuilt) == 4 * group.world_size
    for ours, theirs in zip(held, rebuilt, strict=True):
        assert np.isfinite(ours).all()
        assert ours.tobytes() == theirs.tobytes()
    again.release()
    steps.run(released=(again.seq_id,))


def test_what_a_group_says_of_itself(group: Any, client: Any, oracle: Any) -> None:
    info = client.info
    assert (info.group_id, info.vocab_size, info.block_size, info.num_blocks) == ("g0", 300, 4, 64)
    assert (info.max_model_len, info.max_num_batched_tokens, info.dtype) == (128, 48, "float32")
    assert info.tensor_parallel_size == group.world_size
    assert info.tokenizer_fingerprint == oracle.engine.fingerprint
    assert info.row_invariant
    for rank in group.ranks:
        assert rank.call("health")["state"] == "ready"


@pytest.mark.parametrize("name", ["greedy", "coupled", "coupled-filtered", "penalties"])
def test_text_does_not_depend_on_speculation(
    steps: Steps, oracle: Any, new_sequence: NewSequence, group: Any, name: str
) -> None:
    """Prefill in chunks, rounds with k from 0 to 8: the text is that of plain decoding, token by token."""
    rng = random.Random(name)
    sampling = SETTINGS[name]
    start = prompt(rng, 37)
    truth = oracle.plain(start, sampling, 48)
    sequence = new_sequence(start, sampling)
    while sequence.kv_len < 30:
        steps.run((sequence, sequence.plan(chunk=rng.choice([1, 7, 15]))))
    while len(sequence.tokens) < len(start) + 40:
        proposal, _ = propose(rng, oracle, sequence, rng.randint(0, 8), truth)
        steps.run((sequence, sequence.plan(proposal=proposal)))
    output = sequence.tokens[len(start) :]
    assert output == truth[: len(output)]
    assert any(0 < a < k for k, a in sequence.accepted), "no round was accepted in part: nothing was proven"
    assert any(a == k > 0 for k, a in sequence.accepted), "no proposal was accepted whole: nothing was proven"
    check_kv(group, steps, sequence, new_sequence)


def test_many_sequences_join_and_leave(steps: Steps, oracle: Any, new_sequence: NewSequence, group: Any) -> None:
    """Every verifier in one batch; every round is what a model of one process decides from scratch."""
    rng = random.Random(5)
    names = [*SETTINGS, *SETTINGS]
    waiting = [new_sequence(prompt(rng, rng.randint(1, 14)), SETTINGS[name]) for name in names]
    truths = {sequence.seq_id: oracle.plain(sequence.tokens, sequence.sampling, 22) for sequence in waiting}
    everyone = list(waiting)
    running: list[Any] = []
    left: list[int] = []
    checked = 0
    while waiting or running:
        while waiting and len(running) < 4:
            running.append(waiting.pop())
        plans, expected = [], {}
        room = 48
        for sequence in running:
            if sequence.kv_len == 0 and len(sequence.tokens) > 6:
                plan = sequence.plan(chunk=5)
            else:
                proposal, rows = propose(rng, oracle, sequence, rng.randint(0, 8), truths[sequence.seq_id])
                expected[sequence.seq_id] = oracle.outcome(sequence.tokens, proposal, rows, sequence.sampling)
                plan = sequence.plan(proposal=proposal, rows=rows)
            room -= len(plan.tokens)
            assert room >= 0
            plans.append((sequence, plan))
        rng.shuffle(plans)
        result = steps.run(*plans, released=tuple(left))
        left = []
        for (sequence, _), answer in zip(plans, result.sequences, strict=True):
            if sequence.seq_id in expected:
                verdict = expected[sequence.seq_id]
                assert (answer.num_accepted, answer.committed[-1]) == (verdict.num_accepted, verdict.next_token)
                checked += 1
        for sequence in [item for item in running if len(item.tokens) > item.prompt_len + 18]:
            if sequence.seq_id in (1, 5, 10):
                check_kv(group, steps, sequence, new_sequence)
            running.remove(sequence)
            left.append(sequence.seq_id)
            sequence.release()
    assert checked > 40
    rounds = [entry for sequence in everyone for entry in sequence.accepted]
    assert any(0 < a < k for k, a in rounds)
    for sequence in everyone:
        if sequence.sampling.verifier is not Verifier.REJECTION:
            output = sequence.tokens[sequence.prompt_len :]
            truth = truths[sequence.seq_id]
            assert output[: len(truth)] == truth[: len(output)]


def test_an_invalid_plan_concerns_one_sequence(steps: Steps, oracle: Any, new_sequence: NewSequence) -> None:
    good, bad = (new_sequence([1, 2, 3, seed], COUPLED) for seed in (4, 5))
    steps.run((good, good.plan()), (bad, bad.plan()))
    wrong = SequencePlan(seq_id=bad.seq_id, generation=1, kv_len=9, tokens=(1,), block_keep=1, logits_rows=(0,))
    plan = good.plan()
    result = steps.client.run(StepPlan(steps.client.epoch, 100, (wrong, plan)))
    assert result.sequences[0].error is SequenceError.INVALID_PLAN
    assert "kv_len is 9" in result.sequences[0].error_message
    good.take(plan, result.sequences[1])
    steps.run((bad, bad.plan()), (good, good.plan()))
    for sequence in (good, bad):
        output = sequence.tokens[4:]
        assert output == oracle.plain(sequence.tokens[:4], COUPLED, len(output))


def test_a_plan_of_invalid_sequences_only(steps: Steps) -> None:
    wrong = SequencePlan(seq_id=5, generation=1, kv_len=0, tokens=(1,), logits_rows=(0,))
    result = steps.client.run(StepPlan(steps.client.epoch, 1, (wrong,)))
    assert [item.error for item in result.sequences] == [SequenceError.INVALID_PLAN]
    assert len(result.ranks) == steps.world_size


def test_q_rows_that_do_not_fit_are_refused(steps: Steps, new_sequence: NewSequence) -> None:
    sequence = new_sequence([1, 2, 3], REJECTION)
    row = SparseRow(np.array([9]), np.array([1.0], dtype=np.float32))
    plan = sequence.plan(proposal=(9, 9), rows=(row,))
    result = steps.client.run(StepPlan(steps.client.epoch, 1, (plan,)))
    assert result.sequences[0].error is SequenceError.INVALID_PLAN
    assert "2 proposals need as many q rows" in result.sequences[0].error_message
    sequence.release()


@pytest.mark.parametrize("probs", [[np.nan, 0.5], [0.0, 0.0], [0.9, 0.9]])
def test_a_draft_row_that_is_no_distribution_counts_as_absent(
    steps: Steps, oracle: Any, new_sequence: NewSequence, probs: list[float]
) -> None:
    """Case S9: the target's own token is used."""
    sequence = new_sequence([1, 2, 3], REJECTION)
    own = oracle.outcome([1, 2, 3], (), (), REJECTION).next_token
    row = SparseRow(np.array([own, 9]), np.array(probs, dtype=np.float32))
    result = steps.run((sequence, sequence.plan(proposal=(own,), rows=(row,))))
    assert (result.sequences[0].num_accepted, result.sequences[0].committed) == (0, (own,))
    sequence.release()


def test_a_preempted_sequence_goes_on(steps: Steps, oracle: Any, new_sequence: NewSequence) -> None:
    sequence, other = new_sequence([5, 6, 7], COUPLED), new_sequence([8], GREEDY)
    steps.run((sequence, sequence.plan()), (other, other.plan()))
    steps.run((sequence, sequence.plan(proposal=(1, 2, 3))))
    sequence.release()
    sequence.kv_len, sequence._sent = 0, 0
    other_plan = other.plan(proposal=(1,) * 8)  # takes the blocks over
    steps.run((other, other_plan))
    steps.run((sequence, sequence.plan()))
    steps.run((sequence, sequence.plan()))
    output = sequence.tokens[3:]
    assert output == oracle.plain([5, 6, 7], COUPLED, len(output))

"""Plans that are made before the result of the step before is known: the leader of two real ranks fills them in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.core.ahead import resolve
from outrider.core.plan import SequenceError, SequencePlan, StepPlan, committed_checksum
from outrider.core.sampling import Sampling, Verifier
from outrider.core.wire import plan_to_wire, result_from_wire

GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
PENALISED = Sampling(
    temperature=0.9, seed=3, verifier=Verifier.COUPLED, controls=(("repetition_penalty", 1.3),), prompt_len=5
)
PROMPT = [3, 14, 15, 92, 65]


@pytest.fixture(scope="module")
def group(model_dir: str, group_class: Any) -> Iterator[Any]:
    group = group_class(model_dir, 2)
    yield group
    group.stop()


def first(seq_id: int, sampling: Sampling, **changes: Any) -> SequencePlan:
    """The whole prompt at once, in blocks of its own with room for what follows."""
    blocks = tuple(range(16 * (seq_id - 1), 16 * seq_id))
    plan = SequencePlan(seq_id, 1, 0, tuple(PROMPT), block_append=blocks, logits_rows=(4,), sampling=sampling)
    return replace(plan, **changes)


def follow(seq_id: int, **changes: Any) -> SequencePlan:
    """One more row behind the token that the step before draws."""
    return replace(SequencePlan(seq_id, 1, 0, (), block_keep=16, logits_rows=(0,)), **changes)


def run(client: Any, *sequences: tuple[SequencePlan, ...]) -> list[Any]:
    """Send all steps at once, each but the first after the one before it; returns their results."""
    plans = [
        StepPlan(client.epoch, step, plan, after_step=step - 1 if step > 1 else None)
        for step, plan in enumerate(sequences, 1)
    ]
    for plan in plans:
        client.send(plan=plan_to_wire(plan))
    results, before = [], None
    for plan in plans:
        response = client.receive()
        result = result_from_wire(response.header.epoch, response.result)
        assert result.step == plan.step
        before = (resolve(plan, *before) if before is not None else plan), result.sequences
        refused = {s.seq_id for s in result.sequences if s.error is SequenceError.INVALID_PLAN}
        held = [(s.seq_id, s.kv_len) for s in before[0].sequences if s.seq_id not in refused]
        assert [report.committed_checksum for report in result.ranks] == [committed_checksum(held)] * 2
        results.append(result)
    return results


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED])
def test_the_text_is_that_of_plain_decoding(client: Any, oracle: Any, sampling: Sampling) -> None:
    """Under a penalty too, which looks at every token before."""
    results = run(client, (first(1, sampling),), *[(follow(1),)] * 11)
    tokens = [token for result in results for token in result.sequences[0].committed]
    assert tokens == oracle.plain(PROMPT, sampling, 12)


def test_chunks_of_a_prompt_and_other_sequences_beside_it(client: Any, oracle: Any) -> None:
    """A sequence that the step before does not carry is planned as ever."""
    begin = first(1, GREEDY, tokens=tuple(PROMPT[:2]), logits_rows=())
    rest = replace(follow(1), tokens=tuple(PROMPT[2:]), logits_rows=(2,))
    results = run(client, (begin,), (rest, first(2, GREEDY)), (follow(2), follow(1)), (follow(1),))
    wanted = oracle.plain(PROMPT, GREEDY, 3)
    committed: dict[int, list[int]] = {1: [], 2: []}
    for result in results:
        for sequence in result.sequences:
            assert sequence.error is None
            committed[sequence.seq_id] += sequence.committed
    assert committed == {1: wanted, 2: wanted[:2]}


def test_rejected_tokens_are_behind_it(client: Any, oracle: Any) -> None:
    """Positions count from what the step before commits, however much of its proposal that is."""
    truth = oracle.plain(PROMPT, GREEDY, 6)
    for right in range(4):
        guess = (*truth[1 : 1 + right], *[(token + 1) % 300 for token in truth[1 + right : 4]])
        verify = SequencePlan(
            1, 1, 5, (truth[0], *guess), block_keep=16, num_proposal_tokens=3, logits_rows=(0, 1, 2, 3)
        )
        start = client.run(StepPlan(client.epoch, 1, (first(1, GREEDY),)))
        assert start.sequences[0].committed == (truth[0],)
        client.send(plan=plan_to_wire(StepPlan(client.epoch, 2, (verify,))))
        client.send(plan=plan_to_wire(StepPlan(client.epoch, 3, (follow(1),), after_step=2)))
        verified, after = (client.receive().result.sequences[0] for _ in range(2))
        assert list(verified.committed) == truth[1 : 2 + right]
        assert list(after.committed) == oracle.plain([*PROMPT, *truth[: 2 + right]], GREEDY, 1)
        client.run(StepPlan(client.epoch, 4, (), released=(1,)))


def test_a_sequence_that_failed_does_not_run_and_the_others_do(client: Any, oracle: Any) -> None:
    bad = first(2, GREEDY, kv_len=3)  # nobody computed those positions
    results = run(client, (bad, first(1, GREEDY)), (follow(2), follow(1)), (follow(1), follow(2)))
    errors = [[sequence.error for sequence in result.sequences] for result in results]
    undecided = SequenceError.UNDECIDED
    assert errors[:2] == [[SequenceError.INVALID_PLAN, None], [undecided, None]]
    assert results[1].sequences[0].error_message
    assert errors[2][0] is None
    tokens = [s.committed[0] for result in results for s in result.sequences if s.seq_id == 1]
    assert tokens == oracle.plain(PROMPT, GREEDY, 3)

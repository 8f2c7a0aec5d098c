"""Prompts that are scored, and prompts that others computed: the same numbers and text whatever the chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.logprobs import TokenLogprobs
from outrider.core.plan import SequenceError, SequencePlan
from outrider.core.sampling import Sampling, Verifier
from outrider.workers.target.step import SCORED_ROWS

PROMPT = [(37 * index * index + 11 * index + 5) % 300 for index in range(41)]
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY, prompt_len=len(PROMPT))
SCORED = replace(GREEDY, prompt_logprobs=3, logprobs=1)
COUPLED = Sampling(temperature=0.8, seed=12, verifier=Verifier.COUPLED, prompt_len=len(PROMPT))
CHUNKS = {"whole": [41], "one by one": [1] * 41, "uneven": [7, 1, 20, 5, 8], "two": [40, 1]}
TOLERANCE = 1e-4
NewSequence = Callable[..., Any]


@pytest.fixture(scope="module")
def group(group_class: Any, model_dir: str) -> Iterator[Any]:
    group = group_class(model_dir, 1)
    yield group
    group.stop()


@pytest.fixture(scope="module")
def reference(model_dir: str) -> torch.Tensor:
    """transformers' log-probabilities behind each token of the prompt. [len(PROMPT), 300] float64"""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, :, :300]  # the rest is padding
    return torch.log_softmax(logits.double(), dim=-1)


def assert_close(entries: list[TokenLogprobs], reference: torch.Tensor) -> None:
    """Entry i belongs to token i + 1 of the prompt."""
    assert [entry.token_id for entry in entries] == PROMPT[1:]
    for entry, row in zip(entries, reference, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
        assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
        assert float(row[list(entry.top_ids)].min()) > float(row.topk(3).values[-1]) - TOLERANCE
        above = int((row > row[entry.token_id] + TOLERANCE).sum())
        below = int((row > row[entry.token_id] - TOLERANCE).sum())
        assert above + 1 <= entry.rank <= below


def score(steps: Any, sequence: Any, chunks: list[int], proposal: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    for chunk in chunks[:-1]:
        steps.run((sequence, sequence.plan(chunk=chunk)))
    assert len(sequence.tokens) == len(PROMPT)
    steps.run((sequence, sequence.plan(proposal=proposal)))
    return list(sequence.prompt_logprobs)


@pytest.mark.parametrize("name", CHUNKS)
def test_scores_of_a_prompt_are_transformers_whatever_the_chunks(
    steps: Any, new_sequence: NewSequence, reference: torch.Tensor, name: str
) -> None:
    sequence, whole = new_sequence(PROMPT, SCORED), new_sequence(PROMPT, SCORED)
    entries = score(steps, sequence, CHUNKS[name])
    assert_close(entries, reference)
    assert entries == score(steps, whole, CHUNKS["whole"])  # by bits: rows do not depend on what runs beside them
    (own,) = sequence.logprobs
    assert own.logprob == pytest.approx(float(reference[-1].max()), abs=TOLERANCE)
    for item in (sequence, whole):
        item.release()


def test_two_ranks_score_as_one(
    start_group: Any, steps_class: Any, new_sequence: NewSequence, reference: torch.Tensor
) -> None:
    """A slice of the vocabulary on each rank; another sequence decodes beside the scored one."""
    client = start_group(2).attach()
    steps = steps_class(client, 2)
    sequence, other = new_sequence(PROMPT, SCORED), new_sequence(PROMPT[:5], replace(COUPLED, prompt_len=5))
    for chunk in CHUNKS["uneven"][:-1]:
        steps.run((other, other.plan()), (sequence, sequence.plan(chunk=chunk)))
    steps.run((sequence, sequence.plan(proposal=(3, 4))), (other, other.plan(proposal=(5,))))
    assert_close(sequence.prompt_logprobs, reference)
    for item in (sequence, other):
        item.release()
    client.close()


def test_a_last_chunk_can_score_and_verify_at_once(
    steps: Any, new_sequence: NewSequence, oracle: Any, reference: torch.Tensor
) -> None:
    truth = oracle.plain(PROMPT, GREEDY, 5)
    sequence = new_sequence(PROMPT, SCORED)
    entries = score(steps, sequence, [30, 11], (*truth[:3], (truth[3] + 1) % 300))
    assert_close(entries, reference)
    assert sequence.tokens[len(PROMPT) :] == truth[:4]
    assert [entry.token_id for entry in sequence.logprobs] == truth[:4]
    sequence.release()


def test_a_chunk_of_more_rows_than_a_slice(start_group: Any, steps_class: Any, oracle: Any) -> None:
    """Logits of scored rows are there in slices: so many rows in one plan take several."""
    tokens = [(7 * index + 3) % 300 for index in range(120)]
    count = len(tokens)
    assert count > SCORED_ROWS
    client = start_group(1, max_num_batched_tokens=128).attach()
    sampling = replace(SCORED, prompt_len=count)
    plan = SequencePlan(
        seq_id=1,
        generation=1,
        kv_len=0,
        tokens=tuple(tokens),
        block_append=tuple(range(-(-count // 4))),
        logits_rows=tuple(range(count)),
        sampling=sampling,
        scored_tokens=tuple(tokens[1:]),
    )
    (answer,) = steps_class(client, 1).ask(plan).sequences
    rows = torch.log_softmax(oracle.logits(tokens, count).double(), dim=-1)
    assert [entry.token_id for entry in answer.prompt_logprobs] == tokens[1:]
    for entry, row in zip(answer.prompt_logprobs, rows, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
    assert len(answer.committed) == len(answer.logprobs) == 1
    client.close()


PENALTIES = (("frequency_penalty", 0.9), ("repetition_penalty", 1.4))


@pytest.mark.parametrize("controls", [(), PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("length", [4, 39, 41])
def test_a_sequence_on_shared_blocks_writes_what_one_from_scratch_writes(
    steps: Any, new_sequence: NewSequence, oracle: Any, controls: tuple[Any, ...], length: int
) -> None:
    """The choices of one request: full blocks are shared, the rest is computed anew, the tokens come along."""
    first = new_sequence(PROMPT, replace(COUPLED, controls=controls))
    steps.run((first, first.plan()))
    second = new_sequence(PROMPT, replace(COUPLED, choice=1, controls=controls))
    second.share(first, length)
    assert second.kv_len == length // 4 * 4
    truths = [oracle.plain(PROMPT, item.sampling, 8) for item in (first, second)]
    steps.run((first, first.plan(proposal=(1, 2, 3))), (second, second.plan(proposal=(*truths[1][:2], 7))))
    while min(len(first.tokens), len(second.tokens)) < len(PROMPT) + 8:
        steps.run((first, first.plan(proposal=(9,))), (second, second.plan(proposal=(9, 9))))
    for item, truth in zip((first, second), truths, strict=True):
        assert item.tokens[len(PROMPT) :][:8] == truth
        item.release()
    assert truths[0] != truths[1]


def test_a_sequence_whose_sampling_looks_back_needs_its_tokens(steps: Any, new_sequence: NewSequence) -> None:
    first = new_sequence(PROMPT, COUPLED)
    steps.run((first, first.plan()))
    second = new_sequence(PROMPT, replace(COUPLED, choice=1, controls=PENALTIES))
    second.share(first, 20)
    plan = second.plan()
    (answer,) = steps.ask(replace(plan, prefix_tokens=())).sequences
    assert answer.error is SequenceError.INVALID_PLAN
    assert "prefix_tokens must name them" in answer.error_message
    steps.run((second, plan))
    for item in (first, second):
        item.release()


def test_a_prompt_with_a_row_that_is_no_distribution_fails_alone(
    start_group: Any, steps_class: Any, make_target_model: Any, tmp_path: Any, new_sequence: NewSequence
) -> None:
    """S8 for scored rows."""
    client = start_group(1, model=make_target_model(tmp_path, nan_token=299)).attach()
    steps = steps_class(client, 1)
    bad = new_sequence([1, 299, 3, 4], replace(SCORED, prompt_len=4))
    good = new_sequence([1, 2, 3, 4], replace(SCORED, prompt_len=4))
    plans = [bad.plan(chunk=3), good.plan()]
    first, second = steps.ask(*plans).sequences
    assert first.error is SequenceError.INVALID_LOGITS
    assert "prompt" in first.error_message
    good.take(plans[1], second)
    assert len(good.prompt_logprobs) == 3
    for item in (bad, good):
        item.release()
    client.close()

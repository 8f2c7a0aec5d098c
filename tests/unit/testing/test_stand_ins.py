"""The stand-in for a target group honours settings as a group does, so that tests of others can rely on it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.plan import SequenceError, SequencePlan, SequenceResult, StepPlan
from outrider.core.sampling import Sampling, Verifier
from outrider.testing import StandInTarget, ToyModel, write_toy_model
from outrider.testing.toy import EOS

MODEL = ToyModel()
PROMPT = tuple(b"to begin")
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY, prompt_len=len(PROMPT))


def first(sampling: Sampling = GREEDY, seq_id: int = 1, **changes: object) -> SequencePlan:
    fields = {
        "tokens": PROMPT,
        "kv_len": 0,
        "block_append": tuple(range(10 * seq_id, 10 * seq_id + 6)),
        "logits_rows": (len(PROMPT) - 1,),
    }
    return SequencePlan(seq_id=seq_id, generation=1, sampling=sampling, **{**fields, **changes})  # type: ignore[arg-type]


def run(target: StandInTarget, plan: SequencePlan) -> SequenceResult:
    (result,) = target.run(StepPlan(1, target.num_steps + 1, (plan,))).sequences
    return result


def with_proposal(*proposal: int, sampling: Sampling = GREEDY) -> SequencePlan:
    k = len(proposal)
    rows = tuple(range(len(PROMPT) - 1, len(PROMPT) + k))
    return first(sampling, tokens=(*PROMPT, *proposal), num_proposal_tokens=k, logits_rows=rows)


def test_controls_see_the_proposals_before_their_row() -> None:
    plain = MODEL.output(PROMPT, 4)
    target = StandInTarget(MODEL)
    assert run(target, first()).committed == (plain[0],)
    banned = replace(GREEDY, controls=(("banned_token_ids", (plain[0],)),))
    assert run(target, first(banned)).committed != (plain[0],)
    once = replace(GREEDY, controls=(("frequency_penalty", 2.0),))
    step_by_step: list[int] = []
    for _ in range(4):
        tokens = (*PROMPT, *step_by_step)
        plan = first(once, tokens=tokens, logits_rows=(len(tokens) - 1,))
        step_by_step += run(target, plan).committed
    assert step_by_step != plain or len(set(plain)) == len(plain)
    assert run(target, with_proposal(*step_by_step[:3], sampling=once)).committed == tuple(step_by_step)
    assert not target.faults


def test_choices_differ_and_the_first_is_the_plain_text() -> None:
    target = StandInTarget(MODEL)
    texts = {choice: MODEL.output(PROMPT, 5, choice) for choice in range(3)}
    assert texts[0] == MODEL.output(PROMPT, 5)
    assert len({tuple(text) for text in texts.values()}) == 3
    for choice, text in texts.items():
        sampling = replace(GREEDY, choice=choice)
        assert run(target, with_proposal(*text[:4], sampling=sampling)).committed == tuple(text)


def test_log_probabilities_belong_to_the_committed_and_the_scored_tokens() -> None:
    target = StandInTarget(MODEL)
    sampling = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    plan = first(sampling, logits_rows=tuple(range(len(PROMPT))), scored_tokens=PROMPT[1:])
    result = run(target, plan)
    assert [entry.token_id for entry in result.logprobs] == list(result.committed)
    assert result.logprobs[0].rank == 1
    assert len(result.logprobs[0].top_ids) == 2
    assert [entry.token_id for entry in result.prompt_logprobs] == list(PROMPT[1:])
    assert all(math.isfinite(entry.logprob) and len(entry.top_ids) == 1 for entry in result.prompt_logprobs)
    again = [run(target, first(sampling, tokens=PROMPT[:5], logits_rows=tuple(range(5)), scored_tokens=PROMPT[1:6]))]
    rest = first(sampling, tokens=PROMPT[5:], kv_len=5, logits_rows=(0, 1, 2), scored_tokens=PROMPT[6:])
    again.append(run(target, replace(rest, sampling=None, block_keep=6, block_append=())))
    assert (*again[0].prompt_logprobs, *again[1].prompt_logprobs) == result.prompt_logprobs
    assert not target.faults
    wrong = replace(plan, scored_tokens=PROMPT[:-1])
    assert run(target, wrong).error is SequenceError.INVALID_PLAN


def test_full_blocks_can_be_shared_and_others_cannot() -> None:
    target = StandInTarget(MODEL)
    run(target, first())
    penalty = replace(GREEDY, choice=1, controls=(("presence_penalty", 0.5),))
    fork = first(penalty, 2, tokens=PROMPT[4:], kv_len=4, block_append=(10, 20, 21), logits_rows=(3,))
    assert run(target, fork).error is SequenceError.INVALID_PLAN
    assert "0 prefix_tokens for 4 positions" in target.faults.pop()
    told = replace(fork, prefix_tokens=PROMPT[:4])
    target.run(
        StepPlan(
            1,
            9,
            (
                replace(first(), tokens=(5,), kv_len=8, sampling=None, block_keep=6, block_append=(), logits_rows=(0,)),
                told,
            ),
        )
    )
    assert not target.faults
    assert target.num_shared == 4
    run(
        target,
        replace(
            told,
            seq_id=3,
            block_append=(10, 11, 22),
            kv_len=5,
            prefix_tokens=PROMPT[:5],
            tokens=PROMPT[5:],
            logits_rows=(2,),
        ),
    )
    assert "belongs to two sequences" in target.faults.pop()
    target.run(StepPlan(1, 10, (), released=(3,)))
    run(target, replace(told, seq_id=4, block_append=(40, 41, 42)))
    assert "do not hold that many positions" in target.faults.pop()


@pytest.mark.parametrize("num_rejected", [0, 4])
def test_who_sits_out_shares_what_it_decided_and_gives_back_what_was_rejected(num_rejected: int) -> None:
    """Its own plan, in which all that is told, comes later."""
    target = StandInTarget(MODEL)
    right = MODEL.output(PROMPT, 5)
    proposal = right[: 4 - num_rejected] + [(token + 1) % 256 for token in right[4 - num_rejected : 4]]
    run(target, with_proposal(*proposal))  # blocks 10, 11 and 12, of which the last is full of tokens that stay or go
    full = 3 if num_rejected == 0 else 2
    text = (*PROMPT, *right)
    beginning = {"tokens": text[4 * full :], "kv_len": 4 * full, "logits_rows": (len(text) - 4 * full - 1,)}
    run(target, first(seq_id=2, block_append=(10, 11, *((12, 20) if full == 3 else (13, 20))), **beginning))
    assert target.num_shared == 4 * full
    assert not target.faults
    # The block of the token that comes next it holds in any case, and a block that is not full is nobody else's.
    run(target, first(seq_id=3, block_append=(30, 31, 10 + full)))
    assert f"block {10 + full} belongs to two sequences" in target.faults.pop()


def test_grammars_end_a_text_inside_a_block(tmp_path: Path) -> None:
    target = StandInTarget(MODEL, model_dir=write_toy_model(tmp_path))
    sampling = replace(GREEDY, grammar=Grammar(GrammarKind.REGEX, "(a|b)c"))
    start = run(target, first(sampling)).committed[0]
    assert chr(start) in "ab"
    result = run(target, with_proposal(start, ord("c"), EOS, sampling=sampling))
    assert result.committed == (start, ord("c"), EOS, EOS)
    assert (result.num_forced_tokens, result.num_forced_accepted) == (2, 2)


@pytest.mark.parametrize("allowed", [(), (5,)])
def test_settings_that_exclude_each_other_end_the_request(allowed: tuple[int, ...]) -> None:
    controls = (("allowed_token_ids", (7,)), ("banned_token_ids", (7, *allowed)))
    result = run(StandInTarget(MODEL), first(replace(GREEDY, controls=controls)))
    assert result.error is SequenceError.NOTHING_ALLOWED
    assert f"position {len(PROMPT)}" in result.error_message

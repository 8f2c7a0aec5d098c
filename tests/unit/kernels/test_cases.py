"""Inputs that broke other systems (docs/cases.md), at the level of the kernels. S4, S6 to S9 are in ``test_verify`` and
``test_draft``."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.core.logprobs import LogprobsMode
from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched.data import Ask, Chain, Outcome
from outrider.kernels.batched.draft import draw
from outrider.kernels.batched.verify import verify

from .strategies import VOCAB_SIZE, row_of

SAMPLED = [Verifier.REJECTION, Verifier.COUPLED]


def settings(verifier: Verifier, **changes: object) -> Sampling:
    temperature = 0.0 if verifier is Verifier.GREEDY else 1.0
    return Sampling(**{"temperature": temperature, "verifier": verifier, "prompt_len": 2, **changes})


def one(chain: Chain) -> Outcome:
    (outcome,) = verify([chain])
    return outcome


def proposed(token: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([token]), torch.tensor([1.0])


@pytest.mark.parametrize("verifier", SAMPLED)
@pytest.mark.parametrize(
    ("control", "excluded"),
    [(("min_p", 0.5), range(1, VOCAB_SIZE)), (("logit_bias", tuple((t, -100.0) for t in range(1, 24))), range(1, 24))],
    ids=["min_p", "logit_bias"],
)
def test_s1_controls_hold_in_every_row_of_p_and_in_q(verifier: Verifier, control: tuple, excluded: range) -> None:
    """Token 0 is twice as likely as any other; the control leaves nothing else, in rows of proposals and the bonus."""
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[:, 0] = math.log(2.1)
    without, with_it = settings(verifier), settings(verifier, controls=(control,))
    seen: dict[int, set[int]] = {0: set(), 1: set(), 2: set(), 3: set()}
    for seed in range(40):
        text = [1, 1]
        (drawn,) = draw(logits[:1], [Ask(settings(verifier, controls=(control,), seed=seed), 2, 0, text)], top_m=64)
        assert drawn.token == 0
        for sampling in (without, with_it):
            chosen = settings(verifier, controls=sampling.controls, seed=seed)
            # One-hot proposals of token 0 in the first rows, and an excluded one in row i.
            for i in range(4):
                proposal = [0] * i + [7] * (i < 3)
                outcome = one(Chain(logits[: len(proposal) + 1], chosen, 2, proposal, text=text))
                if sampling is with_it:
                    assert (outcome.num_accepted, outcome.next_token) == (i, 0)
                else:
                    seen[outcome.num_accepted].add(outcome.next_token)
    assert any(set(excluded) & tokens for tokens in seen.values())  # without the control they do come


@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_s2_a_frequency_penalty_changes_greedy_text_as_without_speculation(penalty: float) -> None:
    """Eight tokens; the same logits everywhere, so that only the penalty moves the text."""
    row = torch.linspace(3.0, 0.0, VOCAB_SIZE)
    sampling = settings(Verifier.GREEDY, controls=(("frequency_penalty", penalty),))
    plain: list[int] = [5, 5]
    while len(plain) < 10:
        plain.append(one(Chain(row[None], sampling, len(plain), text=plain)).next_token)
    assert plain[2:] == ([0] * 8 if penalty < 0 else [0, 1, 2, 3, 4, 5, 6, 7])
    for k in (1, 3, 5):
        text = [5, 5]
        while len(text) < 10:
            proposal = [*plain[len(text) : len(text) + k - 1], 0]  # a right beginning, then token 0
            outcome = one(Chain(row.expand(len(proposal) + 1, -1), sampling, len(text), proposal, text=text))
            text += [*proposal[: outcome.num_accepted], outcome.next_token]
        assert text[:10] == plain


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_s3_row_i_sees_the_proposals_before_it_once_each(name: str) -> None:
    """Three accepted tokens, two of them equal: the bonus row counts each once. The prompt counts for repetition only,
    and what was proposed behind a row never counts."""
    row = torch.full((VOCAB_SIZE,), 1.0)
    row[4], row[6] = 2.0, -1.0
    text, proposal = [9, 4, 11], [4, 6, 4, 8]  # prompt 9, 4; output 11
    counts_by_row = [{11: 1}, {11: 1, 4: 1}, {11: 1, 4: 1, 6: 1}, {11: 1, 4: 2, 6: 1}, {11: 1, 4: 2, 6: 1, 8: 1}]
    sampling = settings(
        Verifier.COUPLED, controls=((name, 1.5),), logprobs=20, logprobs_mode=LogprobsMode.PROCESSED, top_k=20
    )
    for i, counts in enumerate(counts_by_row):
        expected = row.clone()
        for token in {9, 4, *counts} if name == "repetition_penalty" else counts:
            if name == "repetition_penalty":
                expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
            else:
                expected[token] -= 1.5 * (counts[token] if name == "frequency_penalty" else 1)
        # The proposals before row i as text, and as accepted proposals (certain under another row), are the same.
        as_text = one(Chain(row[None], sampling, 3 + i, text=[*text, *proposal[:i]])).logprobs[0]
        certain = torch.full((i, VOCAB_SIZE), -50.0)
        certain[torch.arange(i), proposal[:i]] = 50.0
        chain = Chain(torch.cat([certain, row.expand(5 - i, -1)]), sampling, 3, proposal, text=text)
        outcome = one(chain)
        assert outcome.num_accepted >= i
        in_block = outcome.logprobs[i]
        assert in_block == as_text
        top = expected.topk(20)
        wanted = torch.log_softmax(top.values.double(), -1)
        assert list(in_block.top_logprobs) == pytest.approx(wanted.tolist(), abs=1e-6)


@pytest.mark.parametrize("verifier", SAMPLED)
def test_s5_a_temperature_that_is_not_given_is_1(verifier: Verifier) -> None:
    logits = row_of(5)
    by_default = Sampling(top_k=50, verifier=verifier, logprobs=5, logprobs_mode=LogprobsMode.PROCESSED)
    given = Sampling(temperature=1.0, top_k=50, verifier=verifier, logprobs=5, logprobs_mode=LogprobsMode.PROCESSED)
    assert one(Chain(logits, by_default, 3)) == one(Chain(logits, given, 3))
    raw = torch.log_softmax(logits[0].double(), -1)
    entry = one(Chain(logits, by_default, 3)).logprobs[0]
    assert entry.logprob == pytest.approx(float(raw[entry.token_id]))


@pytest.mark.parametrize("mode", list(LogprobsMode))
@pytest.mark.parametrize("verifier", list(Verifier))
def test_s10_each_committed_token_has_the_targets_log_probability(verifier: Verifier, mode: LogprobsMode) -> None:
    """One entry for each committed token, accepted or drawn, at every length, equal to that of plain decoding."""
    lengths = set()
    for seed in range(30):
        logits = row_of(seed, num_rows=4)
        controls = (("presence_penalty", 1.3),)
        options = {"seed": seed, "controls": controls, "logprobs": 3, "logprobs_mode": mode, "top_k": 9}
        sampling = settings(verifier, **options)
        proposal = logits[:3].argmax(dim=-1).tolist()
        outcome = one(Chain(logits, sampling, 4, proposal, text=[1, 2, 3, 4]))
        committed = [*proposal[: outcome.num_accepted], outcome.next_token]
        assert [entry.token_id for entry in outcome.logprobs] == committed
        lengths.add(len(committed))
        text = [1, 2, 3, 4]
        for entry, token, row in zip(outcome.logprobs, committed, logits, strict=False):
            scores = row.double()
            if mode is LogprobsMode.PROCESSED:
                for seen in set(text[2:]):
                    scores[seen] -= 1.3
                if verifier is not Verifier.GREEDY:
                    scores[scores < scores.topk(9).values[-1]] = -math.inf
            expected = torch.log_softmax(scores, -1)
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-6)
            assert entry.logprob < 0.0
            assert entry.rank == 1 + int((expected > expected[token]).sum())
            assert list(entry.top_ids) == expected.topk(3).indices.tolist()
            assert list(entry.top_logprobs) == pytest.approx(expected.topk(3).values.tolist(), abs=1e-6)
            text.append(token)
    assert len(lengths) > 1


@pytest.mark.parametrize("verifier", list(Verifier))
def test_e4_the_end_is_impossible_before_position_min_tokens_and_possible_from_it(verifier: Verifier) -> None:
    """``min_tokens`` 5, prompt 2, block of proposals that crosses the limit: output tokens 0 to 4 are never EOS."""
    eos = 3
    logits = torch.zeros(8, VOCAB_SIZE)
    logits[:, eos] = 6.0  # likely everywhere
    logits[:, 8] = 4.0
    sampling = settings(verifier, controls=(("min_tokens", (5, (eos,))),))
    for output_len in range(8):
        tokens = set()
        for seed in range(20):
            chosen = settings(verifier, controls=sampling.controls, seed=seed)
            chain = Chain(logits[:1], chosen, 2 + output_len, text=[eos, 1] + [8] * output_len)
            tokens.add(one(chain).next_token)
            (drawn,) = draw(logits[:1], [Ask(chosen, 2 + output_len, 0, chain.text)], top_m=64)
            assert (drawn.token == eos) <= (output_len >= 5)
        assert (eos in tokens) == (output_len >= 5)
    certain = torch.full((8, VOCAB_SIZE), -40.0)
    certain[:, eos], certain[:, 8] = 40.0, 0.0  # 8 is certain where EOS is impossible
    for k in range(1, 8):
        outcome = one(Chain(certain[: k + 1], sampling, 2, [8] * k, text=[eos, 1]))
        assert outcome.num_accepted == min(k, 5)
        assert outcome.next_token == (eos if k >= 5 else 8)
    # The end itself as a proposal: refused in rows 0 to 4, accepted in row 5.
    for i in range(7):
        outcome = one(Chain(certain[: i + 2], sampling, 2, [8] * i + [eos], text=[eos, 1]))
        assert outcome.num_accepted == (i if i < 5 else 5 + (i == 5))


@pytest.mark.parametrize("verifier", list(Verifier))
def test_a_complete_grammar_ends_the_text_before_min_tokens(verifier: Verifier) -> None:
    allowed = torch.zeros(1, VOCAB_SIZE, dtype=torch.bool)
    allowed[0, 3] = True
    sampling = settings(verifier, controls=(("min_tokens", (5, (3, 7))),))
    assert one(Chain(row_of(1), sampling, 2, text=[1, 1], allowed=allowed)).next_token == 3
    allowed[0, 9] = True
    assert one(Chain(row_of(1), sampling, 2, text=[1, 1], allowed=allowed)).next_token == 9


@pytest.mark.parametrize("verifier", list(Verifier))
def test_settings_that_leave_nothing_end_the_request_and_no_other(verifier: Verifier) -> None:
    controls = (("allowed_token_ids", (4, 5)), ("banned_token_ids", (4, 5)))
    excluded = Chain(row_of(1, num_rows=2), settings(verifier, controls=controls), 6, [4], text=[1] * 6)
    sound = Chain(row_of(2, num_rows=2), settings(verifier), 6, [4], text=[1] * 6)
    first, second, third = verify([sound, excluded, sound])
    assert first == third == one(sound)
    assert first.error is None
    assert second.error == "no token is allowed at position 6: the sampling settings exclude each other"
    assert second.is_invalid_logits
    assert (second.num_accepted, second.next_token) == (0, -1)
    assert draw(row_of(1), [Ask(excluded.sampling, 6, 0, excluded.text)], top_m=5) == [None]


@pytest.mark.parametrize("verifier", list(Verifier))
def test_a_row_that_is_not_reached_is_not_judged(verifier: Verifier) -> None:
    """Behind a proposed token that the grammar forbids, masks are empty and logits may be anything."""
    logits = row_of(4, num_rows=3)
    logits[2] = math.nan
    allowed = torch.ones(3, VOCAB_SIZE, dtype=torch.bool)
    allowed[0, 5], allowed[1:] = False, False
    outcome = one(Chain(logits, settings(verifier), 2, [5, 6], text=[1, 1], allowed=allowed))
    assert outcome.error is None
    assert outcome.num_accepted == 0
    assert outcome.next_token != 5
    bad = one(Chain(logits[2:], settings(verifier), 4, text=[1] * 4))
    assert bad.error == "the target's logits for position 4 have a NaN or +inf, or no finite entry"
    assert bad.is_invalid_logits

"""Every sampling control over the protocol, on the tiny pair's target: what a group commits with proposals, good ones
and bad ones, is what plain decoding writes from scratch, row by row, with the readable reference.

What a row must be is computed from the committed tokens alone. So a penalty that counts a rejected token, a mask of
another position or a token that stayed in a rank's memory shows as other text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from outrider.controls import CONTROLS
from outrider.core.end_tokens import end_token_ids
from outrider.core.fingerprint import read_vocab
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.logprobs import LogprobsMode
from outrider.core.plan import SequenceError
from outrider.core.sampling import Sampling, Verifier
from outrider.grammar import GrammarCompiler

TINY = Path(__file__).parents[3] / "models" / "tiny" / "target"
VOCAB_SIZE = 1500
EOS = 0
ENDS = sorted(end_token_ids(TINY, read_vocab(TINY)))
COUNT = 18
TEXT = "The river runs past the mill. The river is deep, and the mill is old. The"
VERIFIERS = {
    "greedy": Sampling(temperature=0.0, verifier=Verifier.GREEDY),
    "coupled": Sampling(temperature=1.0, seed=2**40 + 3, verifier=Verifier.COUPLED),
}
REGEX = Grammar(GrammarKind.REGEX, "( [a-z]{1,9}){12,40}[.]")
NewSequence = Callable[..., Any]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TINY, VOCAB_SIZE, ENDS)


@pytest.fixture(scope="module")
def tiny_oracle(oracle_class: Any) -> Any:
    torch.set_num_threads(1)
    return oracle_class(str(TINY))


@pytest.fixture(scope="module")
def tiny_group(group_class: Any) -> Iterator[Any]:
    group = group_class(str(TINY), 1)
    yield group
    group.stop()


@pytest.fixture
def steps(tiny_group: Any, steps_class: Any) -> Iterator[Any]:
    client = tiny_group.attach()
    yield steps_class(client, tiny_group.world_size)
    client.close()


@pytest.fixture(scope="module")
def values(tokenizer: Tokenizer, tiny_oracle: Any) -> dict[str, Any]:
    """A value for each control that changes the text, resolved."""
    said = [
        token
        for sampling in VERIFIERS.values()
        for token in tiny_oracle.plain(tokenizer.encode(TEXT).ids, sampling, COUNT)
    ]
    common = sorted({token for token in said if token != EOS}, key=lambda token: -said.count(token))
    pair = tuple(said[3:5])
    return {
        "logit_bias": tuple(sorted((token, -4.0) for token in common[:4])),
        "repetition_penalty": 1.6,
        "presence_penalty": 1.5,
        "frequency_penalty": 2.0,
        "bad_words": ((common[0],), pair, (common[1], common[2])),
        "allowed_token_ids": tuple(sorted(set(common[2:]) | set(range(5, VOCAB_SIZE, 7)))),
        "banned_token_ids": tuple(sorted(common[:3])),
        "min_tokens": (12, (EOS, *common[:2])),
        "min_p": 0.3,
        "typical_p": 0.4,
    }


def test_every_control_has_a_value_here(values: dict[str, Any]) -> None:
    assert sorted(values) == sorted(control.name for control in CONTROLS)


def proposal(rng: random.Random, truth: list[int], done: int, kind: str) -> tuple[int, ...]:
    """Up to six tokens: all right, all drawn blindly, or mostly one of them wrong."""
    k = rng.randint(2, 6)
    if kind == "bad":
        return tuple(rng.randrange(VOCAB_SIZE) for _ in range(k))
    tokens = [*truth[done : done + k], *(rng.randrange(VOCAB_SIZE) for _ in range(done + k - len(truth)))]
    if kind == "mixed" and rng.random() < 0.8:
        wrong = rng.randrange(k)
        tokens[wrong] = (tokens[wrong] + 1 + rng.randrange(VOCAB_SIZE - 1)) % VOCAB_SIZE
    return tuple(tokens)


def speculate(steps: Any, sequence: Any, truth: list[int], kind: str, seed: str) -> list[int]:
    """Rounds until as many tokens as in the truth are committed; the output."""
    rng = random.Random(seed)
    while len(sequence.tokens) - sequence.kv_len > 8:
        steps.run((sequence, sequence.plan(chunk=7)))
    while (done := len(sequence.tokens) - sequence.prompt_len) < len(truth):
        tokens = () if rng.random() < 0.1 else proposal(rng, truth, done, kind)
        steps.run((sequence, sequence.plan(proposal=tokens)))
    output: list[int] = sequence.tokens[sequence.prompt_len :][: len(truth)]
    sequence.release()
    steps.run(released=(sequence.seq_id,))
    return output


CASES = [(control.name, verifier) for control in CONTROLS for verifier in VERIFIERS] + [
    ("grammar", verifier) for verifier in VERIFIERS
]


@pytest.mark.parametrize(("name", "verifier"), CASES)
def test_a_control_means_the_same_with_speculation(
    steps: Any,
    tiny_oracle: Any,
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    new_sequence: NewSequence,
    values: dict[str, Any],
    name: str,
    verifier: str,
) -> None:
    """S1, S2, S3. Bad proposals leave nothing behind, neither in the cache nor in the ranks' memory of the tokens."""
    prompt = tokenizer.encode(TEXT).ids
    plain = replace(VERIFIERS[verifier], prompt_len=len(prompt))
    if name == "grammar":
        sampling, matcher = replace(plain, grammar=REGEX), compiler.matcher(REGEX)
    else:
        sampling, matcher = replace(plain, controls=((name, values[name]),)), None
    truth = tiny_oracle.plain(prompt, sampling, COUNT, matcher)
    has_effect = truth != tiny_oracle.plain(prompt, plain, COUNT)
    is_warp = name in ("min_p", "typical_p")
    assert has_effect != (is_warp and verifier == "greedy"), "the value changes nothing: nothing is proven"
    for kind in ("good", "mixed", "bad"):
        sequence = new_sequence(prompt, sampling)
        assert speculate(steps, sequence, truth, kind, f"{name} {verifier} {kind}") == truth
        rounds = [(k, accepted) for k, accepted in sequence.accepted if k]
        if kind == "good":
            assert all(accepted == k for k, accepted in rounds[:-1])
        if kind == "mixed":
            assert any(accepted > 0 for _, accepted in rounds)
            assert any(accepted < k for k, accepted in rounds)


@pytest.mark.parametrize("seed", range(6))
def test_controls_together_mean_the_same_with_speculation(
    steps: Any,
    tiny_oracle: Any,
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    new_sequence: NewSequence,
    values: dict[str, Any],
    seed: int,
) -> None:
    rng = random.Random(seed)
    prompt = tokenizer.encode(TEXT).ids
    names = sorted(rng.sample([name for name in values if name != "allowed_token_ids"], rng.randint(2, 6)))
    sampling = replace(
        VERIFIERS[rng.choice(list(VERIFIERS))],
        top_k=rng.choice([0, 50]),
        top_p=rng.choice([1.0, 0.95]),
        choice=rng.choice([0, 3]),
        prompt_len=len(prompt),
        controls=tuple((name, values[name]) for name in names),
        grammar=REGEX if seed % 2 else None,
    )
    matcher = compiler.matcher(REGEX) if seed % 2 else None
    truth = tiny_oracle.plain(prompt, sampling, COUNT, matcher)
    for kind in ("good", "mixed"):
        assert speculate(steps, new_sequence(prompt, sampling), truth, kind, f"{seed} {kind}") == truth


def penalised(logits: torch.Tensor, output: list[int], penalty: float) -> torch.Tensor:
    """log-probabilities after a frequency penalty, written anew. logits: [vocab_size]"""
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB_SIZE)
    return torch.log_softmax(logits.double() - penalty * counts, dim=-1)


def test_penalties_count_each_proposal_before_a_row_once(
    steps: Any, tiny_oracle: Any, tokenizer: Tokenizer, new_sequence: NewSequence
) -> None:
    """S3: a block with three accepted tokens, two of which are the same; then the round after it."""
    prompt = tokenizer.encode(TEXT).ids
    sampling = replace(
        VERIFIERS["greedy"],
        prompt_len=len(prompt),
        controls=(("frequency_penalty", 0.7),),
        logprobs=3,
        logprobs_mode=LogprobsMode.PROCESSED,
    )
    truth = tiny_oracle.plain(prompt, sampling, 8)
    sequence = new_sequence(prompt, sampling)
    while len(sequence.tokens) - sequence.kv_len > 8:
        steps.run((sequence, sequence.plan(chunk=7)))
    steps.run((sequence, sequence.plan(proposal=(*truth[:3], (truth[3] + 1) % VOCAB_SIZE))))
    steps.run((sequence, sequence.plan(proposal=tuple(truth[4:7]))))
    assert sequence.accepted[-2:] == [(4, 3), (3, 3)]
    assert sequence.tokens[len(prompt) :] == truth
    rows = tiny_oracle.logits([*prompt, *truth[:-1]], len(truth))
    for index, entry in enumerate(sequence.logprobs):
        expected = penalised(rows[index], truth[:index], 0.7)
        assert entry.token_id == truth[index]
        assert entry.logprob == pytest.approx(float(expected[truth[index]]), abs=1e-4)
        assert entry.top_logprobs == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
        assert list(entry.top_ids) == expected.topk(3).indices.tolist()
    assert len(sequence.logprobs) == len(truth)
    sequence.release()


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_log_probabilities_are_the_targets_for_each_committed_token(
    steps: Any, tiny_oracle: Any, tokenizer: Tokenizer, new_sequence: NewSequence, verifier: str
) -> None:
    """S10, raw: whatever the temperature, and for accepted tokens as for the others."""
    prompt = tokenizer.encode(TEXT).ids
    sampling = replace(VERIFIERS[verifier], prompt_len=len(prompt), logprobs=2)
    truth = tiny_oracle.plain(prompt, sampling, 12)
    sequence = new_sequence(prompt, sampling)
    assert speculate(steps, sequence, truth, "mixed", verifier) == truth
    entries = sequence.logprobs
    output = sequence.tokens[len(prompt) :]
    assert [entry.token_id for entry in entries] == output
    expected = torch.log_softmax(tiny_oracle.logits(sequence.tokens[:-1], len(output)).double(), dim=-1)
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert list(entry.top_ids) == row.topk(2).indices.tolist()
    assert any(accepted for _, accepted in sequence.accepted)


@pytest.mark.parametrize("minimum", [1, 5])
def test_the_end_is_impossible_before_min_tokens_and_possible_from_there(
    steps: Any, tokenizer: Tokenizer, new_sequence: NewSequence, tiny_oracle: Any, minimum: int
) -> None:
    """E4: the end is by far the likeliest token in every row, and proposed in each of them."""
    prompt = tokenizer.encode(TEXT).ids
    sampling = replace(
        VERIFIERS["greedy"],
        prompt_len=len(prompt),
        controls=(("logit_bias", ((EOS, 100.0),)), ("min_tokens", (minimum, (EOS,)))),
    )
    truth = tiny_oracle.plain(prompt, sampling, minimum + 1)
    assert truth.index(EOS) == minimum
    sequence = new_sequence(prompt, sampling)
    while len(sequence.tokens) - sequence.kv_len > 8:
        steps.run((sequence, sequence.plan(chunk=7)))
    for done in range(minimum):  # one round for each token: the end is proposed in every place
        (answer,) = steps.run((sequence, sequence.plan(proposal=(EOS, EOS)))).sequences
        assert answer.num_accepted == 0
        assert sequence.tokens[len(prompt) :] == truth[: done + 1]
    steps.run((sequence, sequence.plan(proposal=(EOS, EOS))))
    assert sequence.tokens[len(prompt) :][: minimum + 1] == truth
    sequence.release()
    block = new_sequence(prompt, sampling)
    while len(block.tokens) - block.kv_len > 8:
        steps.run((block, block.plan(chunk=7)))
    (answer,) = steps.run((block, block.plan(proposal=tuple(truth)))).sequences
    assert answer.committed[: minimum + 1] == tuple(truth)
    block.release()


def test_settings_that_exclude_each_other_end_one_request(
    steps: Any, tiny_oracle: Any, tokenizer: Tokenizer, new_sequence: NewSequence
) -> None:
    prompt = tokenizer.encode("The").ids
    plain = replace(VERIFIERS["coupled"], prompt_len=len(prompt))
    nothing = (("allowed_token_ids", (5, 6)), ("banned_token_ids", (5, 6)))
    good, bad = new_sequence(prompt, plain), new_sequence(prompt, replace(plain, controls=nothing))
    plans = [good.plan(), bad.plan(proposal=(5,))]
    first, second = steps.ask(*plans).sequences
    assert (second.error, second.committed) == (SequenceError.NOTHING_ALLOWED, ())
    assert f"no token is allowed at position {len(prompt)}" in second.error_message
    good.take(plans[0], first)
    assert good.tokens[len(prompt) :] == tiny_oracle.plain(prompt, plain, 1)
    good.release()
    bad.release()


# -- grammars ----------------------------------------------------------------------------------------------------------


def test_a_grammar_that_completes_inside_a_block_ends_the_text(
    steps: Any, tokenizer: Tokenizer, new_sequence: NewSequence, compiler: GrammarCompiler, tiny_oracle: Any
) -> None:
    """E7. Behind the end nothing is free: whoever cuts at it cuts what the grammar does not know."""
    prompt = tokenizer.encode("Answer: ").ids
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["yes"]}))
    sampling = replace(VERIFIERS["coupled"], prompt_len=len(prompt), grammar=grammar)
    said, matcher = list[int](), compiler.matcher(grammar)
    oracle_text = list(prompt)
    while not said or said[-1] not in ENDS:
        outcome = tiny_oracle.outcome(oracle_text, (), (), sampling, matcher)
        said.append(outcome.next_token)
        oracle_text.append(outcome.next_token)
    sequence = new_sequence(prompt, sampling)
    junk = tuple(tokenizer.encode(" and more").ids)
    plan = sequence.plan(proposal=(*said, *junk))
    (answer,) = steps.run((sequence, plan)).sequences
    assert answer.committed[:-2] == tuple(said[:-1])
    assert set(answer.committed[-2:]) <= set(ENDS)
    assert answer.num_forced_tokens >= answer.num_forced_accepted == len(said) - 1
    assert answer.grammar_us > 0
    assert tokenizer.decode(said[:-1]) == '"yes"'
    sequence.release()


def test_forced_tokens_are_told_from_chosen_ones(
    steps: Any, tokenizer: Tokenizer, new_sequence: NewSequence, compiler: GrammarCompiler, tiny_oracle: Any
) -> None:
    prompt = tokenizer.encode("A number: ").ids
    grammar = Grammar(GrammarKind.REGEX, "code=[0-9]{4}!")
    sampling = replace(VERIFIERS["coupled"], prompt_len=len(prompt), grammar=grammar)
    truth, matcher = list[int](), compiler.matcher(grammar)
    while not truth or truth[-1] not in ENDS:
        truth.append(tiny_oracle.outcome([*prompt, *truth], (), (), sampling, matcher).next_token)
    assert tokenizer.decode(truth).startswith("code=")
    rows = compiler.matcher(grammar).allowed([], truth)[: len(truth)]
    forced = [int(row.sum()) == 1 for row in rows]
    assert 0 < sum(forced) < len(forced)
    sequence = new_sequence(prompt, sampling)
    wrong_from = forced.index(False)  # the first digit is proposed wrongly
    digits = rows[wrong_from].nonzero()[0]
    wrong = int(next(digit for digit in digits if digit != truth[wrong_from]))
    (answer,) = steps.run(
        (sequence, sequence.plan(proposal=(*truth[:wrong_from], wrong, *truth[wrong_from + 1 :])))
    ).sequences
    assert answer.num_accepted == answer.num_forced_accepted == wrong_from
    assert answer.num_forced_tokens >= wrong_from
    sequence.release()


def test_an_output_outside_the_grammar_fails_that_sequence_alone(
    steps: Any, tokenizer: Tokenizer, new_sequence: NewSequence, tiny_oracle: Any
) -> None:
    """A scheduler that says that other tokens were committed than the group said. Then a grammar that is none."""
    prompt = tokenizer.encode("A number: ").ids
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{4}")
    plain = replace(VERIFIERS["coupled"], prompt_len=len(prompt))
    good, bad = new_sequence(prompt, plain), new_sequence(prompt, replace(plain, grammar=grammar))
    none = new_sequence(prompt, replace(plain, grammar=Grammar(GrammarKind.REGEX, "(")))
    steps.run((good, good.plan()), (bad, bad.plan()))
    bad.tokens[-1] = tokenizer.encode("x").ids[0]
    plans = [good.plan(), bad.plan(), none.plan()]
    first, second, third = steps.ask(*plans).sequences
    if third.error is SequenceError.NOT_READY:
        third = until_ready(steps, none)
    good.take(plans[0], first)
    assert second.error is third.error is SequenceError.INVALID_PLAN
    assert "leaves its grammar" in second.error_message
    assert "sampling.grammar.regex is '('" in third.error_message
    assert good.tokens[len(prompt) :] == tiny_oracle.plain(prompt, plain, 2)
    for sequence in (good, bad, none):
        sequence.release()


def until_ready(steps: Any, sequence: Any) -> Any:
    """Ask again as a scheduler does, until the answer is another one than NOT_READY."""
    sequence.kv_len = len(sequence.tokens) - 1
    for _ in range(2000):
        (answer,) = steps.ask(sequence.plan()).sequences
        if answer.error is not SequenceError.NOT_READY:
            return answer
    raise AssertionError("still not ready")


@pytest.fixture
def held_grammars(tiny_group: Any) -> Iterator[Callable[[], None]]:
    """No grammar gets compiled until the value is called."""
    tiny_group.ranks[0].call("hold_grammars")
    yield lambda: tiny_group.ranks[0].call("release_grammars")
    tiny_group.ranks[0].call("release_grammars")


def test_a_grammar_that_takes_long_holds_up_nobody_else(
    steps: Any, held_grammars: Callable[[], None], tokenizer: Tokenizer, new_sequence: NewSequence, tiny_oracle: Any
) -> None:
    """While it is compiled, the others' rounds go on and its prompt is scored; then it follows the grammar."""
    prompt = tokenizer.encode("Begin: ").ids
    grammar = Grammar(GrammarKind.EBNF, 'root ::= "x" "x" "x" "y"\n')
    plain = replace(VERIFIERS["coupled"], prompt_len=len(prompt))
    slow = new_sequence(prompt, replace(plain, grammar=grammar, prompt_logprobs=0))
    other = new_sequence(prompt, plain)
    truth = tiny_oracle.plain(prompt, plain, 12)
    steps.run((other, other.plan()))
    plans = [slow.plan(), other.plan(proposal=tuple(truth[1:3]))]
    first, second = steps.ask(*plans).sequences
    assert first.error is SequenceError.NOT_READY
    assert len(first.prompt_logprobs) == len(prompt) - 1
    other.take(plans[1], second)
    assert other.tokens[len(prompt) :] == truth[:4]
    slow.kv_len = len(prompt) - 1
    while len(other.tokens) < len(prompt) + 8:
        plans = [slow.plan(), other.plan()]
        first, second = steps.ask(*plans).sequences
        assert first.error is SequenceError.NOT_READY
        other.take(plans[1], second)
    held_grammars()
    answer = until_ready(steps, slow)
    assert answer.error is None
    assert tokenizer.decode(answer.committed) in ("x", "xx", "xxx", "xxxy")
    slow.release()
    other.release()

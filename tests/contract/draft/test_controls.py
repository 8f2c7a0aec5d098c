"""Sampling controls and grammars in a draft worker with the tiny pair's draft: proposals are what plain decoding with
the same settings writes, with the readable reference; what a draft cannot apply costs acceptance and no session.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from outrider.controls import CONTROLS, RowText
from outrider.core.end_tokens import end_token_ids
from outrider.core.fingerprint import read_vocab, tokenizer_fingerprint
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.sampling import Sampling, Verifier
from outrider.core.wire import sampling_to_wire
from outrider.grammar import GrammarCompiler, Matcher
from outrider.kernels.batched.data import Chain
from outrider.kernels.reference.chain import verify_one
from outrider.kernels.reference.distribution import distribution
from outrider.v1 import draft_pb2
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.parallel import Parallel

TINY = Path(__file__).parents[3] / "models" / "tiny" / "draft"
VOCAB_SIZE = 1500
ENDS = sorted(end_token_ids(TINY, read_vocab(TINY)))
TOP_M = 16
TEXT = "The river runs past the mill. The river is deep, and the mill is old. The"
VERIFIERS = {
    "greedy": Sampling(temperature=0.0, verifier=Verifier.GREEDY),
    "coupled": Sampling(temperature=1.0, seed=2**40 + 3, verifier=Verifier.COUPLED),
    "rejection": Sampling(temperature=0.9, seed=77, verifier=Verifier.REJECTION),
}
VALUES = {
    "logit_bias": tuple((token, 3.0) for token in range(300, 340)),
    "repetition_penalty": 1.8,
    "presence_penalty": 1.5,
    "frequency_penalty": 2.0,
    "bad_words": ((80,), (201, 80), (269,)),
    "allowed_token_ids": tuple(range(5, VOCAB_SIZE, 7)),
    "banned_token_ids": tuple(range(200, 1400, 5)),
    "min_tokens": (30, (0, *range(200, 1400, 3))),
    "min_p": 0.2,
    "typical_p": 0.5,
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "sizes": {"type": "array", "items": {"enum": [1, 20]}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Grammar(GrammarKind.REGEX, "( [a-z]{1,9}){3,40}[.]"),
    "ebnf": Grammar(GrammarKind.EBNF, 'start: item ("," item)*\nitem: /[a-z]+/ "=" /[0-9]{1,4}/\n'),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TINY, VOCAB_SIZE, ENDS)


@pytest.fixture(scope="module")
def engine() -> Engine:
    from outrider.cluster.config import DraftConfig

    config = DraftConfig(model=str(TINY), device="cpu", block_size=8, num_kv_blocks=100, num_threads=1)
    return Engine(config, Parallel.single())


@pytest.fixture
def tiny_worker(start_worker: Callable[..., Any]) -> Any:
    return start_worker(model=str(TINY), max_model_len=512, num_kv_blocks=400)


@pytest.fixture
async def scheduler(tiny_worker: Any, connect: Callable[..., Any]) -> Any:
    return await connect(tiny_worker, fingerprint=tokenizer_fingerprint(TINY))


def logits_after(engine: Engine, tokens: Sequence[int]) -> torch.Tensor:
    """[vocab_size] float32"""
    table = range(-(-len(tokens) // engine.block_size))
    return engine.local_logits(engine.forward([SequenceRows(tokens, 0, table, (len(tokens) - 1,))]))[0]


def allowed_after(matcher: Matcher | None, text: Sequence[int], prompt_len: int) -> torch.Tensor | None:
    return None if matcher is None else torch.from_numpy(matcher.allowed(text[prompt_len:]))


def check_proposal(engine: Engine, text: list[int], proposal: Any, sampling: Sampling, matcher: Matcher | None) -> None:
    """Each token is what the reference draws behind the tokens before it, drafted ones among them."""
    tokens = list(text)
    assert proposal.base_len == len(text)
    assert bool(proposal.rows) == (sampling.verifier is Verifier.REJECTION)
    for index, token in enumerate(proposal.tokens):
        if tokens[-1] in ENDS and matcher is not None:
            break  # nobody looks behind the end
        logits = logits_after(engine, tokens)
        allowed = allowed_after(matcher, tokens, sampling.prompt_len)
        assert allowed is None or allowed[0, token], "a token that the grammar forbids"
        if sampling.verifier is not Verifier.REJECTION:
            chain = Chain(logits[None], sampling, len(tokens), text=tokens, allowed=allowed)
            assert token == verify_one(chain).next_token, f"token {index}"
        else:
            row_text = RowText(tokens, len(tokens), sampling.prompt_len)
            probs = distribution(logits, sampling, row_text, None if allowed is None else allowed[0]).exp()
            row = proposal.rows[index]
            kept = torch.from_numpy(row.token_ids)
            assert len(kept) == min(TOP_M, int((probs > 0).sum()))
            assert token in row.token_ids
            expected = probs[kept] / probs.topk(TOP_M).values.sum()
            np.testing.assert_allclose(row.probs, expected.numpy(), rtol=1e-4)
        tokens.append(token)


async def play(
    scheduler: Any,
    engine: Engine,
    session_id: int,
    prompt: list[int],
    sampling: Sampling,
    matcher: Matcher | None = None,
    rounds: int = 4,
) -> list[Any]:
    """A session whose commits accept parts of the proposals and go on with legal tokens; checks each proposal."""
    rng = random.Random(session_id)
    text, proposals = list(prompt), []
    await scheduler.open(session_id, text, sampling, num_tokens=5)
    while True:
        answered, proposal = await scheduler.proposal()
        assert answered == session_id
        check_proposal(engine, text, proposal, sampling, matcher)
        proposals.append(proposal)
        if len(proposals) == rounds:
            break
        base = len(text)
        text += proposal.tokens[: rng.randint(0, 4)]
        row = allowed_after(matcher, text, sampling.prompt_len)
        candidates = range(VOCAB_SIZE) if row is None else row[0].nonzero()[:, 0].tolist()
        text.append(rng.choice(list(candidates)))
        if text[-1] in ENDS:
            break
        await scheduler.commit(session_id, text, base, num_tokens=5)
    await scheduler.send(generation=1, close=draft_pb2.Close(session_id=session_id))
    return proposals


def test_every_control_has_a_value_here() -> None:
    assert sorted(VALUES) == sorted(control.name for control in CONTROLS)


@pytest.mark.parametrize("verifier", VERIFIERS)
async def test_proposals_obey_every_control(
    tiny_worker: Any, scheduler: Any, engine: Engine, tokenizer: Tokenizer, verifier: str
) -> None:
    """S1, S3, S4: q is of the same settings as p, counts drafted tokens, and the row that travels is what was drawn."""
    prompt = tokenizer.encode(TEXT).ids
    plain = replace(VERIFIERS[verifier], prompt_len=len(prompt))
    free = (await play(scheduler, engine, 1, prompt, plain))[0].tokens
    changed = set()
    # What the free text says first is what these leave out.
    forbidding = {"bad_words": (free[:1],), "banned_token_ids": free[:2], "min_tokens": (30, (0, *free[:2]))}
    for session_id, (name, value) in enumerate({**VALUES, **forbidding}.items(), 2):
        sampling = replace(plain, controls=((name, value),))
        proposals = await play(scheduler, engine, session_id, prompt, sampling)
        if proposals[0].tokens != free:
            changed.add(name)
    several = ("frequency_penalty", "logit_bias", "min_p", "repetition_penalty")
    together = replace(plain, top_k=40, controls=tuple((name, VALUES[name]) for name in several))
    await play(scheduler, engine, 50, prompt, together)
    assert changed >= {*forbidding, "logit_bias", "repetition_penalty", "allowed_token_ids"}, "nothing is proven"
    tiny_worker.check_integrity()


async def test_sessions_with_all_settings_share_their_steps(
    tiny_worker: Any, scheduler: Any, engine: Engine, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """S6: proposals of mixed sessions are those of each alone."""
    prompt = tokenizer.encode(TEXT).ids
    samplings: dict[int, Sampling] = {}
    for number, (name, value) in enumerate(VALUES.items()):
        plain = replace(list(VERIFIERS.values())[number % 3], prompt_len=len(prompt))
        samplings[len(samplings)] = replace(plain, controls=((name, value),))
        grammar = list(GRAMMARS.values())[number % 3]
        samplings[len(samplings)] = replace(plain, grammar=grammar)
    await warm_up(tiny_worker, scheduler, prompt)
    for session_id, sampling in samplings.items():
        await scheduler.open(session_id, prompt, sampling, num_tokens=4)
    for _ in samplings:
        session_id, proposal = await scheduler.proposal()
        sampling = samplings[session_id]
        matcher = compiler.matcher(sampling.grammar) if sampling.grammar is not None else None
        check_proposal(engine, prompt, proposal, sampling, matcher)
    assert tiny_worker.inspect(lambda batcher: batcher.num_steps) < len(samplings) * 4


async def warm_up(worker: Any, scheduler: Any, prompt: list[int]) -> None:
    """Have every grammar compiled, so that the first proposal of a session follows it already."""
    for number, grammar in enumerate(GRAMMARS.values()):
        session_id = 900 + number
        sampling = replace(VERIFIERS["greedy"], prompt_len=len(prompt), grammar=grammar)
        await scheduler.open(session_id, prompt, sampling, num_tokens=0)
        await worker.until(
            lambda batcher, session_id=session_id: any(
                session.address.session_id == session_id and session.matcher is not None and session.matcher.done()
                for session in batcher.sessions.values()
            )
        )
        await scheduler.send(generation=1, close=draft_pb2.Close(session_id=session_id))


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", GRAMMARS)
async def test_proposals_stay_in_the_grammar_through_rollbacks(
    tiny_worker: Any,
    scheduler: Any,
    engine: Engine,
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    name: str,
    verifier: str,
) -> None:
    """The session's matcher goes back with each commit; what is expected comes from another one, from scratch."""
    prompt = tokenizer.encode("Say: ").ids
    await warm_up(tiny_worker, scheduler, prompt)
    sampling = replace(VERIFIERS[verifier], prompt_len=len(prompt), grammar=GRAMMARS[name])
    matcher = compiler.matcher(GRAMMARS[name])
    proposals = await play(scheduler, engine, 1, prompt, sampling, matcher, rounds=6)
    assert len(proposals) >= 2
    assert all(len(proposal.tokens) == 5 for proposal in proposals)
    tiny_worker.check_integrity()


async def test_what_a_draft_cannot_apply_costs_no_session(
    tiny_worker: Any, scheduler: Any, engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(TEXT).ids
    plain = replace(VERIFIERS["coupled"], prompt_len=len(prompt))
    cases = {
        1: replace(plain, controls=(("from_a_later_version", 3.0),)),
        2: replace(plain, controls=(("min_p", 17.0),)),
        3: replace(plain, grammar=Grammar(GrammarKind.REGEX, "(")),
    }
    for session_id, sampling in cases.items():
        await scheduler.open(session_id, prompt, sampling, num_tokens=5)
        answered, proposal = await scheduler.proposal()
        assert answered == session_id
        check_proposal(engine, prompt, proposal, plain, None)


async def test_settings_that_are_not_understood_end_their_session_only(scheduler: Any, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT).ids
    wire = sampling_to_wire(VERIFIERS["coupled"])
    wire.controls["min_p"] = "{"
    opened = draft_pb2.Open(session_id=1, tokens=prompt, sampling=wire, num_tokens=3)
    await scheduler.send(generation=1, open=opened)
    assert (await scheduler.receive()).evicted.session_id == 1
    await scheduler.open(2, prompt, VERIFIERS["coupled"], num_tokens=3)
    assert (await scheduler.proposal())[0] == 2


async def test_a_grammar_that_takes_long_holds_up_nobody(
    tiny_worker: Any,
    scheduler: Any,
    engine: Engine,
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it is compiled, its own session drafts freely; then it follows the grammar, from a legal text on."""
    compile_it, may_compile = GrammarCompiler.matcher, threading.Event()

    def matcher(compiler: GrammarCompiler, grammar: Grammar) -> Matcher:
        assert may_compile.wait(timeout=60)
        return compile_it(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "matcher", matcher)
    prompt = tokenizer.encode("Say: ").ids
    heavy = Grammar(GrammarKind.EBNF, 'root ::= "x" "x" "x" "y"\n')
    plain = replace(VERIFIERS["coupled"], prompt_len=len(prompt))
    await scheduler.open(1, prompt, replace(plain, grammar=heavy), num_tokens=3)
    answered, proposal = await scheduler.proposal()
    assert answered == 1
    check_proposal(engine, prompt, proposal, plain, None)
    await scheduler.open(2, prompt, plain, num_tokens=3)
    answered, proposal = await scheduler.proposal()
    assert answered == 2
    check_proposal(engine, prompt, proposal, plain, None)
    assert not tiny_worker.inspect(lambda batcher: is_compiled(batcher, 1))
    may_compile.set()
    await tiny_worker.until(lambda batcher: is_compiled(batcher, 1))
    (row,) = compiler.matcher(heavy).allowed([])
    text = [*prompt, int(row.nonzero()[0][0])]
    await scheduler.commit(1, text, len(prompt), num_tokens=3)
    _, proposal = await scheduler.proposal()
    check_proposal(engine, text, proposal, replace(plain, grammar=heavy), compiler.matcher(heavy))


def is_compiled(batcher: Any, session_id: int) -> bool:
    (session,) = [item for item in batcher.sessions.values() if item.address.session_id == session_id]
    return bool(session.matcher.done())

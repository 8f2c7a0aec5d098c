"""Matchers over the tiny pair's tokenizer: what they allow, and that going back leaves nothing behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from outrider.core.errors import InvalidRequest
from outrider.core.fingerprint import tokenizer_vocab_size
from outrider.core.grammar import Grammar, GrammarKind
from outrider.grammar import MAX_TEXT_BYTES, GrammarCompiler, GrammarError, Matcher

MODEL = Path(__file__).parents[3] / "models" / "tiny" / "target"
VOCAB_SIZE = tokenizer_vocab_size(MODEL)
EOS = 0
OTHER_EOS = 1

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Grammar(GrammarKind.REGEX, "(yes|no)( really){0,5}|[a-z]{3,20}[0-9]+!"),
    "lark": Grammar(GrammarKind.EBNF, 'start: expr\nexpr: term ("+" term)*\nterm: /[0-9]{1,6}/ | "(" expr ")"\n'),
    "gbnf": Grammar(GrammarKind.EBNF, 'root ::= pair ("," pair)*\npair ::= [a-z]+ "=" [0-9]+ # a pair\n'),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def choose(row: np.ndarray, rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(row)))


def walk(matcher: Matcher, rng: np.random.Generator, count: int) -> list[int]:
    output: list[int] = []
    while len(output) < count and (not output or output[-1] != EOS):
        output.append(choose(matcher.allowed(output)[0], rng))
    return output


@pytest.mark.parametrize("name", GRAMMARS)
def test_rows_along_a_proposal_are_those_of_a_fresh_matcher(compiler: GrammarCompiler, name: str) -> None:
    """Random walks that go forth, and back to a random place, with proposals that are right and wrong."""
    rng = np.random.default_rng(7)
    matcher = compiler.matcher(GRAMMARS[name])
    went_back = illegal = 0
    for _ in range(12):
        output = walk(compiler.matcher(GRAMMARS[name]), rng, 30)
        for _ in range(8):
            base = int(rng.integers(0, len(output)))
            prefix = output[:base]
            proposal = output[base : base + int(rng.integers(0, 6))]
            if proposal and rng.random() < 0.5:
                proposal[int(rng.integers(0, len(proposal)))] = int(rng.integers(0, VOCAB_SIZE))
            rows = matcher.allowed(prefix, proposal)
            assert rows.shape == (len(proposal) + 1, VOCAB_SIZE)
            assert rows.dtype == np.bool_
            for index in range(len(proposal) + 1):
                fresh = compiler.matcher(GRAMMARS[name]).allowed([*prefix, *proposal[:index]])[0]
                assert np.array_equal(rows[index], fresh), (prefix, proposal[:index])
                went_back += 1
                if index < len(proposal) and not fresh[proposal[index]]:
                    assert rows[index + 1 :].all()  # no longer a part of the language: never reached
                    illegal += 1
                    break
    assert went_back > 100
    assert illegal > 10


def test_texts_of_a_schema_validate_and_are_compact(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        output = walk(compiler.matcher(GRAMMARS["schema"]), rng, 200)
        assert output[-1] == EOS
        text = tokenizer.decode(output[:-1], skip_special_tokens=False)
        value = json.loads(text)
        jsonschema.validate(value, SCHEMA)
        assert text.startswith('{"name":"')
        assert '","age":' in text
    spacious = {**SCHEMA, "x-guidance": {"whitespace_flexible": True}}
    row = compiler.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(spacious))).allowed(tokenizer.encode("{").ids)[0]
    assert row[tokenizer.encode("\n").ids[0]]


def test_a_text_that_is_complete_can_only_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """E7: the grammar completes inside a block. What follows the end means nothing, but must not be empty."""
    matcher = compiler.matcher(Grammar(GrammarKind.REGEX, "yes"))
    said = tokenizer.encode("yes").ids
    only_the_end = np.arange(VOCAB_SIZE) == EOS
    rows = matcher.allowed([], [*said, EOS, *said])
    assert np.array_equal(rows[len(said)], only_the_end)
    assert np.array_equal(rows[len(said) + 1], only_the_end)
    assert rows[len(said) + 2 :].all()
    assert np.array_equal(matcher.allowed([*said, EOS])[0], only_the_end)
    assert np.array_equal(matcher.allowed([], said)[0], rows[0])


def test_every_token_that_ends_a_text_may_end_it(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS, OTHER_EOS])
    matcher = compiler.matcher(Grammar(GrammarKind.REGEX, "(yes)+"))
    said = tokenizer.encode("yes").ids
    row = matcher.allowed(said)[0]
    assert row[EOS]
    assert row[OTHER_EOS]
    assert not matcher.allowed([])[0][[EOS, OTHER_EOS]].any()


def test_padding_of_the_vocabulary_is_never_allowed() -> None:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE + 36, [EOS])
    row = compiler.matcher(Grammar(GrammarKind.REGEX, ".*")).allowed([])[0]
    assert row.shape == (VOCAB_SIZE + 36,)
    assert not row[VOCAB_SIZE:].any()


def test_an_output_that_is_not_in_the_language_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(Grammar(GrammarKind.REGEX, "yes|no"))
    first = matcher.allowed([])[0]
    yes, no = tokenizer.encode("yes").ids, tokenizer.encode("no").ids
    for output in (
        [*yes, *no],
        [EOS],
        [*yes, EOS, *no],
        [VOCAB_SIZE + 5],
        [-1],
        [no[0], EOS] if len(no) > 1 else [EOS],
    ):
        with pytest.raises(GrammarError):
            matcher.allowed(output)
        assert np.array_equal(matcher.allowed([])[0], first)  # it can go on
    assert matcher.allowed(no)[0][EOS]


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    rng = np.random.default_rng(0)
    one, other = compiler.matcher(GRAMMARS["lark"]), compiler.matcher(GRAMMARS["lark"])
    before = other.allowed([])[0]
    walk(one, rng, 10)
    assert np.array_equal(other.allowed([])[0], before)
    assert np.array_equal(compiler.matcher(GRAMMARS["lark"]).allowed([])[0], before)


REFUSED = {
    "regex": Grammar(GrammarKind.REGEX, "(a"),
    "look-around": Grammar(GrammarKind.REGEX, "(?=a)b"),
    "not JSON": Grammar(GrammarKind.JSON_SCHEMA, '{"type"'),
    "not an object": Grammar(GrammarKind.JSON_SCHEMA, "true"),
    "unknown type": Grammar(GrammarKind.JSON_SCHEMA, '{"type":"text"}'),
    "unsupported": Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","contains":{"type":"integer"}}'),
    "impossible": Grammar(GrammarKind.JSON_SCHEMA, '{"enum":[]}'),
    "endless": Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"#"}'),
    "elsewhere": Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"http://127.0.0.1:1/schema"}'),
    "unknown rule": Grammar(GrammarKind.EBNF, "start: foo"),
    "unknown GBNF rule": Grammar(GrammarKind.EBNF, 'root ::= "a" foo'),
    "no rule": Grammar(GrammarKind.EBNF, " "),
    "never done": Grammar(GrammarKind.EBNF, 'start: start "a"'),
    "surrogate": Grammar(GrammarKind.REGEX, "\ud800"),
    "too long": Grammar(GrammarKind.REGEX, "a" * (MAX_TEXT_BYTES + 1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_compile_is_refused(compiler: GrammarCompiler, case: str) -> None:
    grammar = REFUSED[case]
    for refuse in (compiler.check, compiler.matcher):
        with pytest.raises(InvalidRequest) as caught:
            refuse(grammar)
        assert caught.value.field == f"sampling.grammar.{grammar.kind.value}"
        assert len(str(caught.value)) < 1500
        assert "\n" not in str(caught.value)


def chain(count: int) -> str:
    return "start: r0\n" + "".join(f'r{index}: "x" r{index + 1}\n' for index in range(count)) + f'r{count}: "y"\n'


# Each of these hung, filled the memory of, or killed a process that compiled it.
HOSTILE = {
    "deep rules": Grammar(GrammarKind.EBNF, chain(8000)),
    "deep parentheses": Grammar(GrammarKind.EBNF, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "patterns at once": Grammar(
        GrammarKind.JSON_SCHEMA,
        json.dumps({"allOf": [{"type": "string", "pattern": f"a{index}"} for index in range(300)]}),
    ),
    "much memory": Grammar(GrammarKind.REGEX, "a?" * 20_000),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_grammars_are_refused_in_time(compiler: GrammarCompiler, case: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest):
        compiler.check(HOSTILE[case])
    assert time.monotonic() - started < 120
    compiler.check(GRAMMARS["regex"])  # the next ones are served


def test_a_model_without_a_usable_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, 10, [0])
    with pytest.raises(InvalidRequest, match="the tokenizer of this model cannot follow grammars"):
        compiler.check(GRAMMARS["regex"])
    compiler.close()

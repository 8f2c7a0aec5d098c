"""The schemas of ``examples/schemas``: each compiles, and whatever its mask allows ends soon and follows it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from outrider.core.grammar import Grammar, GrammarKind
from outrider.grammar import GrammarCompiler

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "tiny" / "target"
SCHEMAS = sorted((ROOT / "examples" / "schemas").glob("*.json"))
EOS = 0
# Of one answer, whatever is chosen: the README of the folder tells it.
MAX_TOKENS = 200
NUM_WALKS = 40

Choose = Callable[[Sequence[int]], int]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(MODEL, tokenizer.get_vocab_size(), [EOS])


def walk(compiler: GrammarCompiler, schema: str, choose: Choose) -> list[int]:
    """Tokens that the mask allowed, up to the end of the text."""
    matcher = compiler.matcher(Grammar(GrammarKind.JSON_SCHEMA, schema))
    tokens: list[int] = []
    while len(tokens) <= MAX_TOKENS:
        (allowed,) = matcher.allowed(tokens)
        candidates = np.flatnonzero(allowed).tolist()
        assert candidates, "nothing is allowed"
        token = choose(candidates)
        if token == EOS:
            return tokens
        tokens.append(token)
    pytest.fail(f"no end within {MAX_TOKENS} tokens")


def test_there_are_ten() -> None:
    assert len(SCHEMAS) == 10


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_a_random_walk_under_the_mask_ends_and_validates(
    path: Path, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = path.read_text(encoding="utf-8")
    Draft202012Validator.check_schema(json.loads(schema))
    validator = Draft202012Validator(json.loads(schema), format_checker=Draft202012Validator.FORMAT_CHECKER)
    texts = set()
    for seed in range(NUM_WALKS):
        tokens = walk(compiler, schema, random.Random(seed).choice)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        validator.validate(json.loads(text))
        texts.add(text)
    assert len(texts) > NUM_WALKS / 2  # it leaves something to choose


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_the_longest_way_ends_too(path: Path, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Escapes instead of characters, one more item instead of the end, one character at a time."""
    spelt = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    first = {"\\": 0, "u": 1, ",": 2}

    def longest(candidates: Sequence[int]) -> int:
        return min(
            candidates,
            key=lambda token: (token == EOS, first.get(spelt[token], 3), len(spelt[token]), spelt[token] in '"]}'),
        )

    walk(compiler, path.read_text(encoding="utf-8"), longest)

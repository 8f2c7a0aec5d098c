"""What a grammar allows next, through llguidance: the router checks grammars, leaders and drafts follow them.

JSON schemas stand for compact JSON, without blanks between its parts: a model that is unsure could write those for
ever. A schema that wants them says so itself (``"x-guidance": {"whitespace_flexible": true}``). A regular expression
matches the whole output. A context-free grammar is in Lark's notation as llguidance knows it, or in GBNF, which is
recognised by its ``::=``.

Every step works within ``LIMITS``, and a grammar that was never seen is tried in a process of its own first, so that a
hostile one fails instead of taking a server's time, memory or life.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from outrider.core.errors import InvalidRequest
from outrider.core.grammar import Grammar, GrammarKind
from outrider.grammar_trial import Trials

K = TypeVar("K")
V = TypeVar("V")

MAX_TEXT_BYTES = 1 << 18
# Grammars that are kept, compiled or known to compile: those used last.
MAX_COMPILED = 64
MAX_CHECKED = 512
# A grammar that is too large to be followed shows it within its first tokens.
NUM_TRIED_TOKENS = 8
# Of what users read in an error.
MAX_SHOWN = 300

# About 20 ms of lexing and 3 ms of parsing for one token, 100 MB of lexer states.
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class GrammarError(Exception):
    """A matcher cannot go on: the output is not in the language, or following it takes more than the limits."""


class Matcher:
    """Follows one output through its grammar, back as well as forth. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """``matcher``: at the start of the output, and of nobody else."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._eos_only = np.zeros(vocab_size, dtype=np.bool_)
        self._eos_only[sorted(eos_token_ids)] = True
        self._consumed: list[int] = []

    def allowed(self, output: Sequence[int], proposal: Sequence[int] = ()) -> np.ndarray:
        """What may follow an output, and what may follow each token of a proposal that continues it.

        Behind a token that ends the text only such a token is allowed. Rows behind a proposed token that the grammar
        forbids mean nothing: they allow everything.

        Returns:
            [len(proposal) + 1, vocab_size] bool.

        Raises:
            GrammarError: the output is not the beginning of a text of the language, or the limits are reached. The
                matcher can still be asked about other outputs in the first case only.
        """
        tokens = list(output)
        has_ended = bool(tokens) and tokens[-1] in self._eos_token_ids
        self._go_to(tokens[:-1] if has_ended else tokens)
        if has_ended and not self._mask()[tokens[-1]]:
            raise GrammarError(f"the output ends after {len(tokens) - 1} tokens, where its grammar demands more")
        rows = np.ones((len(proposal) + 1, self._vocab_size), dtype=np.bool_)
        rows[0] = self._eos_only if has_ended else self._mask()
        for index, token in enumerate(proposal):
            if not 0 <= token < self._vocab_size or not rows[index, token]:
                break
            has_ended = has_ended or token in self._eos_token_ids
            if has_ended:
                rows[index + 1] = self._eos_only
            else:
                self._consume([token])  # most of the time it will be committed: the next call goes back if not
                rows[index + 1] = self._mask()
        return rows

    def _go_to(self, output: list[int]) -> None:
        """Roll back to what the output has in common with the tokens that were consumed, and consume the rest."""
        agreed = _common_prefix(self._consumed, output)
        surplus = len(self._consumed) - agreed
        if surplus:
            self._check(self._matcher.rollback(surplus))
            del self._consumed[agreed:]
        if agreed < len(output):
            self._consume(output[agreed:])

    def _consume(self, tokens: list[int]) -> None:
        for index, token in enumerate(tokens):
            if not 0 <= token < self._vocab_size or token in self._eos_token_ids:
                self._consume(tokens[:index])
                raise GrammarError(f"token {token} at {len(self._consumed)} of the output is none that a text contains")
        count = self._matcher.try_consume_tokens(tokens)
        self._consumed += tokens[:count]
        self._check(True)
        if count < len(tokens):
            raise GrammarError(f"token {tokens[count]} at {len(self._consumed)} of the output leaves its grammar")

    def _mask(self) -> np.ndarray:
        """What may follow the tokens that were consumed. [vocab_size] bool"""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check(True)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _check(self, succeeded: bool) -> None:
        if self._matcher.is_error() or not succeeded:
            raise GrammarError(f"the grammar cannot be followed: {_one_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Makes matchers for the vocabulary of one model. Any thread may call it; compiling lets others run meanwhile."""

    def __init__(self, model_dir: str | Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Nothing is read before the first grammar comes.

        Args:
            model_dir: holds ``tokenizer.json``.
            vocab_size: tokens that may be sampled.
            eos_token_ids: all tokens that end a text.
        """
        self._path = Path(model_dir) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._checked: OrderedDict[bytes, None] = OrderedDict()
        self._trials = Trials(model_dir, vocab_size, sorted(self._eos_token_ids))

    def check(self, grammar: Grammar) -> None:
        """Try a grammar of a stranger, in a process of its own (``outrider.grammar_trial``). May take seconds.

        Raises:
            InvalidRequest: it names the field where the grammar does not compile within bounds, or allows no text.
            Unavailable: that process cannot be started.
        """
        _check_size(grammar)
        digest = hashlib.blake2b(repr(grammar).encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = digest in self._checked
        if not known:
            fault = self._trials.fault(grammar)
            if fault is not None:
                raise fault
        with self._lock:
            _remember(self._checked, digest, None, MAX_CHECKED)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of the output, for a grammar that passed ``check`` somewhere.

        Raises ``InvalidRequest`` as ``check`` does. Compiles unless the grammar was used lately.
        """
        return Matcher(self.compile(grammar).deep_copy(), self._vocab_size, self._eos_token_ids)

    def has(self, grammar: Grammar) -> bool:
        """Whether ``matcher`` need not compile."""
        with self._lock:
            return grammar in self._compiled

    def compile(self, grammar: Grammar) -> LLMatcher:
        """The compiled grammar, which nobody may move. Unlike ``check`` in this process, without a bound on time."""
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)
        with self._lock:
            _remember(self._compiled, grammar, matcher, MAX_COMPILED)
        return matcher

    def close(self) -> None:
        """End what ``check`` started."""
        self._trials.close()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        _check_size(grammar)
        field = _field(grammar)
        shown = grammar.text if len(grammar.text) <= MAX_SHOWN else grammar.text[:MAX_SHOWN] + "..."
        try:
            source = _source(grammar)
        except Exception as error:  # llguidance's converter from GBNF raises bare Exception
            raise InvalidRequest(field, shown, f"one that compiles: {_one_line(str(error))}") from error
        matcher = LLMatcher(self._vocabulary(field), source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(field, shown, f"one that compiles: {_one_line(matcher.get_error())}")
        trial = Matcher(matcher.deep_copy(), self._vocab_size, self._eos_token_ids)
        try:
            _try(trial, self._eos_token_ids)
        except GrammarError as error:
            raise InvalidRequest(field, shown, f"one that allows a text within the limits: {error}") from error
        return matcher

    def _vocabulary(self, field: str) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._path.read_text(encoding="utf-8"),
                        n_vocab=self._vocab_size,
                        eos_token=sorted(self._eos_token_ids),
                    )
                except Exception as error:  # the library raises whatever its parts raise
                    reason = _one_line(str(error))
                    raise InvalidRequest(
                        field, "set", f"absent: the tokenizer of this model cannot follow grammars: {reason}"
                    ) from error
            return self._tokenizer


def _field(grammar: Grammar) -> str:
    return f"sampling.grammar.{grammar.kind.value}"


def _check_size(grammar: Grammar) -> None:
    num_bytes = len(grammar.text.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_TEXT_BYTES:
        raise InvalidRequest(_field(grammar), f"{num_bytes} bytes long", f"at most {MAX_TEXT_BYTES} bytes long")


def _remember(kept: OrderedDict[K, V], key: K, value: V, count: int) -> None:
    """Keep what was used last."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > count:
        kept.popitem(last=False)


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises ``ValueError`` and others for what is not in its notation."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = json.loads(grammar.text)
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema is an object here")
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_flexible": False})
    if not grammar.text.strip() and grammar.kind is GrammarKind.EBNF:
        raise ValueError("there is no rule in it")
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    is_gbnf = re.search(r"^\s*[A-Za-z][\w-]*\s*::=", grammar.text, re.MULTILINE) is not None
    return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text) if is_gbnf else grammar.text)


def _try(matcher: Matcher, eos_token_ids: frozenset[int]) -> None:
    """Follow the first text that comes to hand. Raises ``GrammarError`` where there is none."""
    output: list[int] = []
    for _ in range(NUM_TRIED_TOKENS):
        (row,) = matcher.allowed(output)
        candidates = np.flatnonzero(row)
        if len(candidates) == 0:
            raise GrammarError("no token is allowed")
        token = int(candidates[0])
        if token in eos_token_ids:
            return
        output.append(token)


def _common_prefix(left: list[int], right: list[int]) -> int:
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(index for index in range(shorter) if left[index] != right[index])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_SHOWN]

"""What each control accepts, and what it refuses with which words."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from outrider.controls import (
    CONTROLS,
    Facts,
    Stage,
    by_name,
    gather_needed,
    needs_text,
    resolve_controls,
    sampling_fault,
)
from outrider.core.errors import InvalidRequest
from outrider.core.sampling import Sampling
from outrider.core.wire import controls_from_wire, controls_to_wire

VOCAB_SIZE = 100


def encode(text: str) -> list[int]:
    """A token for each letter; a space belongs to the letter behind it. "?" is beyond the vocabulary."""
    tokens: list[int] = []
    for index, letter in enumerate(text):
        if letter == "?":
            tokens.append(VOCAB_SIZE)
        elif letter != " ":
            is_spaced = index > 0 and text[index - 1] == " "
            tokens.append(ord(letter) - ord("a") + (30 if is_spaced else 0))
    return tokens


FACTS = Facts(VOCAB_SIZE, frozenset({7, 3}), encode)

ACCEPTED: list[tuple[str, Any, Any]] = [
    ("logit_bias", {"5": 100, 2: -100.0, "9": 0}, ((2, -100.0), (5, 100.0))),
    ("logit_bias", {}, None),
    ("repetition_penalty", 10, 10.0),
    ("repetition_penalty", 0.01, 0.01),
    ("repetition_penalty", 1, None),
    ("presence_penalty", -2, -2.0),
    ("presence_penalty", 2.0, 2.0),
    ("presence_penalty", 0, None),
    ("frequency_penalty", -2.0, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("frequency_penalty", 0.0, None),
    ("bad_words", ["ab", " c"], ((0, 1), (2,), (30, 1), (32,))),
    ("bad_words", ["a b"], ((0, 31), (30, 31))),
    ("bad_words", [], None),
    ("allowed_token_ids", [9, 3, 3.0], (3, 9)),
    ("allowed_token_ids", list(range(VOCAB_SIZE)), None),
    ("banned_token_ids", [99, 0, 99], (0, 99)),
    ("banned_token_ids", [], None),
    ("min_tokens", 5, (5, (3, 7))),
    ("min_tokens", 2.0, (2, (3, 7))),
    ("min_tokens", 0, None),
    ("min_p", 0.25, 0.25),
    ("min_p", 1, 1.0),
    ("min_p", 0, None),
    ("typical_p", 0.2, 0.2),
    ("typical_p", 1.0, None),
]

REFUSED: list[tuple[str, Any, str]] = [
    ("logit_bias", [1], "sampling.logit_bias is [1], but must be an object"),
    ("logit_bias", {"100": 1.0}, "sampling.logit_bias[100] is 100, but must be a token id from 0 to 99"),
    ("logit_bias", {"-1": 1.0}, "sampling.logit_bias[-1] is '-1', but must be a token id from 0 to 99"),
    ("logit_bias", {"4": 100.5}, "sampling.logit_bias[4] is 100.5, but must be a number from -100 to 100"),
    ("logit_bias", {"4": math.nan}, "sampling.logit_bias[4] is nan, but must be a number from -100 to 100"),
    ("logit_bias", {4: 1.0, "4": 2.0}, "sampling.logit_bias[4] is '4', but must be a token that is named once only"),
    ("logit_bias", {i: 1.0 for i in range(1025)}, "sampling.logit_bias is '1025 entries', but must be at most 1024"),
    ("repetition_penalty", 0.0, "sampling.repetition_penalty is 0.0, but must be from 0.01 to 10"),
    ("repetition_penalty", 10.5, "sampling.repetition_penalty is 10.5, but must be from 0.01 to 10"),
    ("repetition_penalty", -1.0, "sampling.repetition_penalty is -1.0, but must be from 0.01 to 10"),
    ("presence_penalty", 2.01, "sampling.presence_penalty is 2.01, but must be from -2 to 2"),
    ("frequency_penalty", -2.01, "sampling.frequency_penalty is -2.01, but must be from -2 to 2"),
    ("bad_words", "ab", "sampling.bad_words is 'ab', but must be a list of words"),
    ("bad_words", ["a", " "], "sampling.bad_words[1] is ' ', but must be a word that is not empty"),
    ("bad_words", [3], "sampling.bad_words[0] is 3, but must be a word that is not empty"),
    ("bad_words", ["a?"], "sampling.bad_words[0] is 'a?', but must be a word that the tokenizer spells"),
    ("bad_words", ["a"] * 1025, "sampling.bad_words is '1025 words', but must be at most 1024 words"),
    ("allowed_token_ids", [], "sampling.allowed_token_ids is [], but must be a list of at least one token id"),
    ("allowed_token_ids", [4, 100], "sampling.allowed_token_ids[1] is 100, but must be a token id from 0 to 99"),
    ("allowed_token_ids", 4, "sampling.allowed_token_ids is 4, but must be a list of token ids"),
    ("banned_token_ids", [1.5], "sampling.banned_token_ids[0] is 1.5, but must be a token id from 0 to 99"),
    ("banned_token_ids", [True], "sampling.banned_token_ids[0] is True, but must be a token id from 0 to 99"),
    ("banned_token_ids", list(range(100)), "sampling.banned_token_ids is 'all 100 tokens', but must be a list that"),
    ("min_tokens", -1, "sampling.min_tokens is -1, but must be a whole number from 0"),
    ("min_tokens", 1.5, "sampling.min_tokens is 1.5, but must be a whole number from 0"),
    ("min_tokens", 2**31, "sampling.min_tokens is 2147483648, but must be a whole number from 0 to 2147483647"),
    ("min_p", -0.1, "sampling.min_p is -0.1, but must be from 0 to 1"),
    ("min_p", 1.1, "sampling.min_p is 1.1, but must be from 0 to 1"),
    ("typical_p", 0.0, "sampling.typical_p is 0.0, but must be above 0 and at most 1"),
    ("typical_p", 1.5, "sampling.typical_p is 1.5, but must be above 0 and at most 1"),
]
NUMBERS = ["repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "typical_p", "min_tokens"]
REFUSED += [
    (name, value, f"sampling.{name} is {value!r}, but must be ")
    for name in NUMBERS
    for value in (math.nan, math.inf, -math.inf, "1", True, None, [1])
]


@pytest.mark.parametrize(("name", "given", "resolved"), ACCEPTED, ids=str)
def test_a_good_value_resolves_travels_and_is_accepted_behind_the_wire(name: str, given: Any, resolved: Any) -> None:
    controls = resolve_controls({name: given}, FACTS)
    assert controls == (() if resolved is None else ((name, resolved),))
    travelled = controls_from_wire(controls_to_wire(controls))
    assert travelled == controls
    assert sampling_fault(Sampling(controls=travelled), VOCAB_SIZE) is None


@pytest.mark.parametrize(("name", "given", "message"), REFUSED, ids=str)
def test_a_bad_value_is_refused_with_field_value_and_limit(name: str, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_controls({name: given}, FACTS)
    assert str(caught.value).startswith(message)


# Resolved values that no router of ours sends.
FAULTY: list[tuple[str, Any]] = [
    ("logit_bias", [[4]]),
    ("logit_bias", 3),
    ("logit_bias", [[100, 1.0]]),
    ("logit_bias", [[4, 1e9]]),
    ("bad_words", []),
    ("bad_words", [[]]),
    ("bad_words", [3]),
    ("bad_words", [[100]]),
    ("bad_words", "ab"),
    ("bad_words", [[1]] * 2049),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [100]),
    ("allowed_token_ids", None),
    ("banned_token_ids", [-1]),
    ("banned_token_ids", "1"),
    ("min_tokens", 5),
    ("min_tokens", [5]),
    ("min_tokens", [5, []]),
    ("min_tokens", [5, [100]]),
    ("min_tokens", [-1, [3]]),
    ("min_tokens", ["5", [3]]),
    *((name, value) for name in NUMBERS for value in ("1", None, True, [], {}, 1e300, -1e300)),
]


@pytest.mark.parametrize(("name", "value"), FAULTY, ids=str)
def test_a_bad_resolved_value_is_named(name: str, value: Any) -> None:
    (control,) = controls_from_wire({name: json.dumps(value)})
    fault = sampling_fault(Sampling(controls=(control,)), VOCAB_SIZE)
    assert fault is not None
    assert f"sampling.{name}" in fault


def test_unknown_controls_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling.controls\['top_a'\] is 0.1, but must be absent: .*min_p"):
        resolve_controls({"top_a": 0.1}, FACTS)
    assert sampling_fault(Sampling(controls=(("top_a", 1),)), VOCAB_SIZE) == (
        "sampling.controls names 'top_a', which is not known here"
    )


def test_a_request_without_end_tokens_needs_no_min_tokens() -> None:
    assert resolve_controls({"min_tokens": 5}, Facts(VOCAB_SIZE, frozenset(), encode)) == ()


ORDER = [
    (Stage.LOGITS, 10, "logit_bias"),
    (Stage.LOGITS, 20, "repetition_penalty"),
    (Stage.LOGITS, 30, "presence_penalty"),
    (Stage.LOGITS, 40, "frequency_penalty"),
    (Stage.LOGITS, 50, "bad_words"),
    (Stage.LOGITS, 60, "allowed_token_ids"),
    (Stage.LOGITS, 70, "banned_token_ids"),
    (Stage.LOGITS, 80, "min_tokens"),
    (Stage.WARP, 30, "min_p"),
    (Stage.WARP, 40, "typical_p"),
]
LOOK_AT_THE_TEXT = {"repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens"}


def test_the_order_is_that_of_the_documentation() -> None:
    """Controls that are added later may stand between these, and nowhere else."""
    order = [(control.stage, control.order, control.name) for control in CONTROLS]
    assert [entry for entry in order if entry in ORDER] == ORDER
    assert order == sorted(order)
    assert len({entry[:2] for entry in order}) == len({entry[2] for entry in order}) == len(order)
    for cases in (ACCEPTED, REFUSED, FAULTY):
        assert {case[0] for case in cases} == {name for _, _, name in ORDER}


@pytest.mark.parametrize("name", [name for _, _, name in ORDER])
def test_a_control_says_what_it_needs(name: str) -> None:
    control = by_name(name)
    assert control is not None
    sampling = Sampling(controls=((name, None),))
    assert gather_needed(sampling)
    assert needs_text(sampling) == control.needs_text == (name in LOOK_AT_THE_TEXT)

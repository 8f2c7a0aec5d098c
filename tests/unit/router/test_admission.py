"""The door: what is filled in, and every refusal with its field, its value and its limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf import json_format

from outrider.core.errors import InvalidRequest
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.logprobs import LogprobsMode
from outrider.core.sampling import Verifier
from outrider.router.admission import Admitted, admit
from outrider.router.sampling_params import Defaults
from outrider.router.submission import submit_from_wire, submit_to_wire
from outrider.router.tokenizer import TextTokenizer
from outrider.testing import write_toy_model
from outrider.testing.toy import EOS
from outrider.v1 import common_pb2, generation_pb2

PROMPT = "Once upon"
BAD_GRAMMAR = Grammar(GrammarKind.REGEX, "(")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(write_toy_model(tmp_path_factory.mktemp("toy")))


def check_grammar(grammar: Grammar) -> None:
    if grammar == BAD_GRAMMAR:
        raise InvalidRequest("sampling.grammar.regex", grammar.text, "one that compiles")


def take(tokenizer: TextTokenizer, **fields: Any) -> Admitted:
    """Admit a request given as JSON of its message; ``sampling`` are the fields of its settings."""
    fields.setdefault("text", PROMPT) if not {"token_ids", "chat"} & set(fields) else None
    sampling = fields.pop("sampling", {})
    controls = sampling.pop("controls", {})
    request = generation_pb2.GenerateRequest(**fields, sampling=generation_pb2.SamplingParams(**sampling))
    for name, value in controls.items():
        if isinstance(value, float) and not math.isfinite(value):
            request.sampling.controls[name].number_value = value
        else:
            json_format.ParseDict(value, request.sampling.controls[name])
    return admit(
        request,
        request_id="r",
        tokenizer=tokenizer,
        check_grammar=check_grammar,
        max_model_len=512,
        defaults=Defaults(),
        deadline=None,
    )


NAN, INF = math.nan, math.inf
VOCABULARY = "a token id from 0 to 257"
# (settings of the sampling, field, value, a part of the limit)
BAD_SAMPLING: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"temperature": NAN}, "temperature", NAN, "from 0.001 to 100"),
    ({"temperature": INF}, "temperature", INF, "from 0.001 to 100"),
    ({"temperature": -0.5}, "temperature", -0.5, "from 0.001 to 100"),
    ({"temperature": 1e-4}, "temperature", 1e-4, "from 0.001 to 100"),
    ({"temperature": 101.0}, "temperature", 101.0, "from 0.001 to 100"),
    ({"top_p": 0.0}, "top_p", 0.0, "above 0 and at most 1"),
    ({"top_p": -0.1}, "top_p", -0.1, "above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p", 1.01, "above 0 and at most 1"),
    ({"top_p": NAN}, "top_p", NAN, "above 0 and at most 1"),
    ({"verifier": 7}, "verifier", 7, "greedy (1), rejection (2) or coupled (3)"),
    ({"verifier": 1}, "verifier", "greedy", "above temperature 0"),
    ({"verifier": 3, "temperature": 0.0}, "verifier", "coupled", "at temperature 0"),
    ({"logprobs": 21}, "logprobs", 21, "from 0 to 20"),
    ({"logprobs": 2**32 - 1}, "logprobs", 2**32 - 1, "from 0 to 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", 21, "from 0 to 20"),
    ({"logprobs_mode": 3}, "logprobs_mode", 3, "raw (1) or processed (2)"),
    ({"min_p": -0.1}, "min_p", -0.1, "from 0 to 1"),
    ({"min_p": 1.5}, "min_p", 1.5, "from 0 to 1"),
    ({"min_p": NAN}, "min_p", NAN, "from 0 to 1"),
    ({"typical_p": 0.0}, "typical_p", 0.0, "1"),
    ({"typical_p": 1.5}, "typical_p", 1.5, "1"),
    ({"typical_p": NAN}, "typical_p", NAN, "1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", 0.0, "0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty", -1.0, "0"),
    ({"repetition_penalty": NAN}, "repetition_penalty", NAN, "0"),
    ({"repetition_penalty": INF}, "repetition_penalty", INF, "0"),
    ({"presence_penalty": 2.5}, "presence_penalty", 2.5, "2"),
    ({"presence_penalty": NAN}, "presence_penalty", NAN, "2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", -2.5, "2"),
    ({"frequency_penalty": INF}, "frequency_penalty", INF, "2"),
    ({"logit_bias": {258: 1.0}}, "logit_bias[258]", 258, VOCABULARY),
    ({"logit_bias": {5: NAN}}, "logit_bias[5]", NAN, "from -100 to 100"),
    ({"logit_bias": {5: 101.0}}, "logit_bias[5]", 101.0, "from -100 to 100"),
    ({"allowed_token_ids": [1, 258]}, "allowed_token_ids[1]", 258, VOCABULARY),
    ({"banned_token_ids": [258]}, "banned_token_ids[0]", 258, VOCABULARY),
    ({"bad_words": ["fine", ""]}, "bad_words[1]", "", "not empty"),
    ({"controls": {"nonesuch": 1}}, "controls['nonesuch']", 1, "the controls are "),
    ({"controls": {"x" * 5000: 1}}, "controls", "x" * 60 + "...", "names are those of controls"),
    ({"controls": {"temperature": 1}}, "controls['temperature']", 1, "the controls are "),
    ({"controls": {"min_p": 2}}, "controls['min_p']", 2, "from 0 to 1"),
    ({"controls": {"min_p": NAN}}, "controls['min_p']", NAN, "from 0 to 1"),
    ({"controls": {"min_p": "0.1"}}, "controls['min_p']", "0.1", "a number"),
    ({"controls": {"min_p": None}}, "controls['min_p']", None, "a number"),
    ({"controls": {"banned_token_ids": [1, 258]}}, "controls['banned_token_ids'][1]", 258, VOCABULARY),
    ({"controls": {"min_p": 0.1}, "min_p": 0.2}, "controls['min_p']", 0.1, "sampling.min_p is given too"),
    ({"grammar": common_pb2.Grammar()}, "grammar", "empty", "one of json_schema, regex and ebnf"),
    ({"grammar": common_pb2.Grammar(regex="(")}, "grammar.regex", "(", "one that compiles"),
]


@pytest.mark.parametrize(("settings", "field", "value", "limit"), BAD_SAMPLING, ids=lambda item: str(item)[:40])
def test_a_bad_setting_is_refused(
    tokenizer: TextTokenizer, settings: dict[str, Any], field: str, value: Any, limit: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        take(tokenizer, sampling=dict(settings))
    assert caught.value.field == f"sampling.{field}"
    assert repr(caught.value.value) == repr(value)
    assert limit in caught.value.limit
    assert str(caught.value) == f"sampling.{field} is {value!r}, but must be {caught.value.limit}"


BAD_REQUESTS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"n": 0}, "n", 0, "from 1 to 64"),
    ({"n": 65}, "n", 65, "from 1 to 64"),
    ({"n": 2, "sampling": {"temperature": 0.0}}, "n", 2, "1 at temperature 0"),
    ({"max_tokens": 0}, "max_tokens", 0, "at least 1"),
    ({"max_tokens": 4, "sampling": {"min_tokens": 5}}, "sampling.min_tokens", 5, "max_tokens, which is 4"),
    (
        {"max_tokens": 4, "sampling": {"controls": {"min_tokens": 5}}},
        "sampling.controls['min_tokens']",
        5,
        "max_tokens, which is 4",
    ),
    (
        {"ignore_eos": True, "sampling": {"grammar": common_pb2.Grammar(regex="a*")}},
        "ignore_eos",
        True,
        "false with a grammar",
    ),
    ({"num_speculative_tokens": 65}, "num_speculative_tokens", 65, "at most 64"),
    ({"stop": [""]}, "stop[0]", "", "from 1 to 256 characters"),
    ({"stop": ["a"] * 17}, "stop", "17 strings", "at most 16 strings"),
    ({"stop_token_ids": [0, 258]}, "stop_token_ids[1]", 258, "below the vocabulary's size, 258"),
    ({"stop_token_ids": [0] * 129}, "stop_token_ids", "129 ids", "at most 128 ids"),
    ({"token_ids": generation_pb2.TokenIds(ids=[258])}, "token_ids.ids[0]", 258, "below the vocabulary's size, 258"),
    ({"text": "x" * 512}, "text", "a prompt of 512 tokens", "at most 511 tokens long"),
    ({"text": ""}, "text", "", "at least one character"),
]


@pytest.mark.parametrize(("fields", "field", "value", "limit"), BAD_REQUESTS, ids=lambda item: str(item)[:40])
def test_a_bad_request_is_refused(
    tokenizer: TextTokenizer, fields: dict[str, Any], field: str, value: Any, limit: str
) -> None:
    fields = {**fields, **({"sampling": dict(fields["sampling"])} if "sampling" in fields else {})}
    with pytest.raises(InvalidRequest) as caught:
        take(tokenizer, **fields)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert limit in caught.value.limit


def test_nothing_given_takes_the_defaults(tokenizer: TextTokenizer) -> None:
    admitted = take(tokenizer)
    request, sampling = admitted.request, admitted.request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.verifier) == (1.0, 0, 1.0, Verifier.COUPLED)
    assert (sampling.controls, sampling.grammar, sampling.logprobs, sampling.prompt_logprobs) == ((), None, None, None)
    assert (sampling.logprobs_mode, sampling.prompt_len, sampling.choice) == (LogprobsMode.RAW, 9, 0)
    assert (request.eos_token_ids, request.stop_token_ids) == ({EOS}, frozenset())
    assert (request.min_tokens, request.num_choices, request.num_speculative_tokens) == (0, 1, None)
    assert (admitted.include_stop, admitted.echo) == (False, None)


def test_every_control_travels_in_its_resolved_form(tokenizer: TextTokenizer) -> None:
    given = {
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {7: 2.0, 3: -1.0},
        "allowed_token_ids": [9, 3, 5],
        "banned_token_ids": [4],
        "bad_words": ["no"],
        "min_tokens": 3,
    }
    by_field = take(tokenizer, sampling=dict(given), stop_token_ids=[65]).request
    controls = dict(by_field.sampling.controls)
    assert list(controls) == sorted(given)
    assert controls["logit_bias"] == ((3, -1.0), (7, 2.0))
    assert controls["allowed_token_ids"] == (3, 5, 9)
    assert controls["min_tokens"] == (3, (65, EOS))
    assert controls["bad_words"] == (tuple(b"no"),)
    assert by_field.min_tokens == 3
    # The same settings by name, as a client of an older protocol would give those of a newer server.
    named = {**given, "logit_bias": {"7": 2.0, "3": -1.0}}
    by_name = take(tokenizer, sampling={"controls": named}, stop_token_ids=[65]).request
    assert by_name.sampling.controls == by_field.sampling.controls
    assert by_name.min_tokens == 3


def test_neutral_values_are_no_controls(tokenizer: TextTokenizer) -> None:
    neutral = {"min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "min_tokens": 0}
    assert take(tokenizer, sampling=neutral).request.sampling.controls == ()


def test_ignore_eos_leaves_the_named_stop_tokens(tokenizer: TextTokenizer) -> None:
    request = take(tokenizer, ignore_eos=True, stop_token_ids=[EOS, 65], sampling={"min_tokens": 2}).request
    assert (request.eos_token_ids, request.stop_token_ids) == (frozenset(), {65, EOS})
    assert dict(request.sampling.controls)["min_tokens"] == (2, (65, EOS))
    alone = take(tokenizer, ignore_eos=True, sampling={"min_tokens": 2}).request
    assert (alone.sampling.controls, alone.min_tokens) == ((), 2)  # stop strings still have to wait


def test_limits_themselves_are_allowed(tokenizer: TextTokenizer) -> None:
    settings = {"logprobs": 20, "prompt_logprobs": 0, "logprobs_mode": 2, "temperature": 100.0, "top_p": 1.0}
    request = take(tokenizer, sampling={**settings, "min_tokens": 4}, n=64, max_tokens=4).request
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs, request.num_choices) == (20, 0, 64)
    assert request.sampling.logprobs_mode is LogprobsMode.PROCESSED
    assert take(tokenizer, n=1, sampling={"temperature": 0.0}).request.num_choices == 1


def test_echo_repeats_the_text_as_it_came_and_spells_tokens(tokenizer: TextTokenizer) -> None:
    assert take(tokenizer, echo=True).echo == PROMPT
    assert take(tokenizer, echo=True, token_ids=generation_pb2.TokenIds(ids=[*b"hi", EOS])).echo == "hi<|end|>"
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    assert take(tokenizer, echo=True, chat=chat).echo == "<|user|>hi\n"


def test_what_was_admitted_reaches_the_owner_of_a_group_unchanged(tokenizer: TextTokenizer) -> None:
    admitted = take(
        tokenizer,
        n=3,
        max_tokens=9,
        stop=["a"],
        stop_token_ids=[65],
        num_speculative_tokens=0,
        sampling={
            "min_p": 0.25,
            "logit_bias": {7: 2.0},
            "bad_words": ["no", "yes"],
            "min_tokens": 3,
            "grammar": common_pb2.Grammar(regex="a*"),
            "logprobs": 2,
            "prompt_logprobs": 0,
            "logprobs_mode": 2,
        },
    ).request
    assert submit_from_wire(submit_to_wire(admitted, 0.0), tokenizer, 0.0) == admitted
    ignoring = take(tokenizer, ignore_eos=True).request
    assert submit_from_wire(submit_to_wire(ignoring, 0.0), tokenizer, 0.0) == ignoring


def test_a_long_value_is_repeated_in_part(tokenizer: TextTokenizer) -> None:
    with pytest.raises(
        InvalidRequest, match=r"sampling.controls\['min_p'\] is \[0, 0, .{150,200}\.\.\., but must be a number"
    ):
        take(tokenizer, sampling={"controls": {"min_p": [0] * 1000}})

"""Every option as the field of a request that it becomes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from outrider.client import InvalidRequest, Options
from outrider.client._controls import CONTROL_FIELDS, CONTROL_NAMES
from outrider.client._request import build_request
from outrider.controls import CONTROLS, NumberControl
from outrider.v1 import common_pb2, generation_pb2


def test_each_option_has_a_field() -> None:
    request = build_request(
        "hi",
        min_p=0.1,
        typical_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={3: -1.5, 4: 2},
        allowed_token_ids=(3, 4),
        banned_token_ids=[5],
        bad_words=["no", "never"],
        min_tokens=4,
        logprobs=0,
        prompt_logprobs=20,
        logprobs_mode="processed",
        n=3,
        ignore_eos=True,
        include_stop=True,
        echo=True,
    )
    assert request == generation_pb2.GenerateRequest(
        text="hi",
        n=3,
        ignore_eos=True,
        include_stop=True,
        echo=True,
        sampling=generation_pb2.SamplingParams(
            min_p=0.1,
            typical_p=0.9,
            repetition_penalty=1.2,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            logit_bias={3: -1.5, 4: 2.0},
            allowed_token_ids=[3, 4],
            banned_token_ids=[5],
            bad_words=["no", "never"],
            min_tokens=4,
            logprobs=0,
            prompt_logprobs=20,
            logprobs_mode=common_pb2.LOGPROBS_MODE_PROCESSED,
        ),
    )


def test_every_field_of_the_protocol_has_an_option() -> None:
    options = set(Options.__annotations__)
    sampling = {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields}
    assert sampling - {"grammar"} <= options
    assert {field.name for field in common_pb2.Grammar.DESCRIPTOR.fields} <= options
    request = {field.name for field in generation_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert request - {"text", "token_ids", "chat", "sampling"} <= options


def test_what_is_not_given_is_absent() -> None:
    bare = build_request("hi", min_p=None, logit_bias=None, logprobs=None, n=None, echo=None)
    assert bare == generation_pb2.GenerateRequest(text="hi")
    assert not bare.sampling.HasField("logprobs")
    assert not bare.HasField("n")
    assert build_request("hi", logprobs=0).sampling.HasField("logprobs")


@pytest.mark.parametrize("given", [{"type": "integer", "title": "größe"}, '{"type": "integer"}', True])
def test_a_schema_is_given_as_a_value_or_as_text(given: Any) -> None:
    grammar = build_request("hi", json_schema=given).sampling.grammar
    assert grammar.WhichOneof("kind") == "json_schema"
    assert json.loads(grammar.json_schema) == (json.loads(given) if isinstance(given, str) else given)


def test_the_order_of_a_schema_stays() -> None:
    schema = {"properties": {"z": {}, "a": {}}}
    assert build_request("hi", json_schema=schema).sampling.grammar.json_schema == json.dumps(schema)


def test_other_grammars() -> None:
    assert build_request("hi", regex="[ab]+").sampling.grammar == common_pb2.Grammar(regex="[ab]+")
    assert build_request("hi", ebnf="start: /a/").sampling.grammar == common_pb2.Grammar(ebnf="start: /a/")
    with pytest.raises(InvalidRequest, match=r"json_schema and ebnf.*must be one of json_schema, regex and ebnf"):
        build_request("hi", json_schema={}, ebnf="start: /a/")


def test_a_control_without_a_field_travels_by_name() -> None:
    value = {"list": [1, 0.5, None, True, "x"], "object": {"5": {}}}
    request = build_request("hi", controls={"novel": value, "min_p": 0.25})
    assert request.sampling.min_p == 0.25
    assert MessageToDict(request.sampling)["controls"] == {"novel": value}
    assert (
        build_request("hi", controls={"novel": {5: []}}).sampling.controls["novel"]
        == (build_request("hi", controls={"novel": {"5": []}}).sampling.controls["novel"])
    )


def test_a_known_control_without_a_field_is_a_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="no such option: novel"):
        build_request("hi", novel=1)  # type: ignore[call-arg]
    monkeypatch.setattr("outrider.client._request.CONTROL_NAMES", CONTROL_NAMES | {"novel"})
    request = build_request("hi", novel=1)  # type: ignore[call-arg]
    assert dict(request.sampling.controls) == {"novel": request.sampling.controls["novel"]}
    assert request.sampling.controls["novel"].number_value == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_with_the_limit_of_its_control(value: float) -> None:
    numbers = [control for control in CONTROLS if isinstance(control, NumberControl)]
    assert numbers
    for control in numbers:
        with pytest.raises(InvalidRequest) as caught:
            build_request("hi", controls={control.name: value})
        assert caught.value.field == f"sampling.{control.name}"
        if control.name in CONTROL_FIELDS:
            assert caught.value.limit == (control.limit(math.inf) or "a finite number")
    with pytest.raises(InvalidRequest, match=r"sampling\.top_p is (nan|-?inf), but must be above 0 and at most 1"):
        build_request("hi", top_p=value)


def test_long_values_are_cut_in_errors() -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request("hi", json_schema="{" * 10_000)
    assert len(str(caught.value)) < 300
    with pytest.raises(InvalidRequest) as caught:
        build_request("hi", seed=10**10_000)
    assert len(str(caught.value)) < 300

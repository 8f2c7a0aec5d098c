"""A whole cluster of the tiny pair through OpenAI's official client, and through LangChain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from outrider.client import Client
from outrider_testbed import Cluster, Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHAT: list[Any] = [{"role": "user", "content": "What does the with statement do?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "human"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": PERSON}}
    for name in ("greet", "feed")
]
MAX_TOKENS = 300  # more than a person takes, each letter as six


@pytest.fixture(scope="module")
def cluster(testbed: Testbed) -> Iterator[Cluster]:
    settings = {
        "router": {"served_model_name": ["tiny", "tiny-alias"]},
        # Looked up within the router, so that something is proposed however late the draft is.
        "speculation": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    }
    with testbed.cluster(testbed.target("one"), (testbed.draft("tiny"),), **settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    found: str = cluster.status()["http_url"]
    return found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "tiny-alias"]
    assert client.models.retrieve("tiny").to_dict()["max_model_len"] == 512


def test_chat_says_what_grpc_says(client: openai.OpenAI, cluster: Cluster) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=48, temperature=0.8, seed=7)
    with Client(cluster.address, timeout=120.0) as grpc:
        expected = grpc.generate(CHAT, max_tokens=48, temperature=0.8, seed=7)
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.object, answer.model) == ("chat.completion", "tiny")


def test_streams_say_the_same_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 48, "temperature": 0.8, "seed": 7}
    whole = client.chat.completions.create(messages=CHAT, **asked)
    chunks = list(
        client.chat.completions.create(messages=CHAT, stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert not any(chunk.usage for chunk in chunks[:-1])

    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counted = list(client.completions.create(prompt="The with", stream=True, stream_options=options, **asked))
    counts = [chunk.usage.completion_tokens for chunk in counted if chunk.usage]
    assert len(counts) == len(counted)
    assert counts == sorted(counts)


def test_a_shared_prefix_is_told_in_usage(client: openai.OpenAI, cluster: Cluster) -> None:
    prefix = "A manager of contexts has two methods, of which one is called before the block and one behind it. "
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    first = client.completions.create(prompt=prefix + "The first", **asked).usage
    before = cluster.status()["groups"][0]["prefix_cache_hit_tokens"]
    second = client.completions.create(prompt=prefix + "They are", **asked).usage
    found = cluster.status()["groups"][0]["prefix_cache_hit_tokens"] - before
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == found > 0
    assert found < second.prompt_tokens
    options: Any = {"include_usage": True}
    chunks = list(client.completions.create(prompt=prefix + "And so", stream=True, stream_options=options, **asked))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == found


def test_what_speculation_did_is_told_as_vllm_tells_it(client: openai.OpenAI) -> None:
    prompt = "The with statement. " * 5
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "temperature": 0}
    answer = client.completions.create(**asked, extra_body={"num_speculative_tokens": 4}).to_dict()
    metrics: Any = answer["metrics"]
    speculation = metrics["speculative_decoding"]
    histogram = speculation["acceptance_histogram"]
    assert set(speculation) == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "num_spec_tokens",
    }
    # What AIPerf holds a record against before it believes it.
    assert sum(histogram) == speculation["num_spec_steps"] > 0
    assert sum(count * number for number, count in enumerate(histogram)) == speculation["num_accepted_draft_tokens"]
    assert len(histogram) == speculation["num_spec_tokens"] + 1
    assert speculation["num_accepted_draft_tokens"] <= speculation["num_draft_tokens"]
    mean = 1 + speculation["num_accepted_draft_tokens"] / speculation["num_spec_steps"]
    assert speculation["mean_acceptance_length"] == pytest.approx(mean)
    assert metrics["outrider"]["verifier"] == "greedy"
    *_, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert set(last.to_dict()["metrics"]["speculative_decoding"]) == set(speculation)  # type: ignore[call-overload]
    silent = client.completions.create(**asked, extra_body={"per_request_spec_decode_metrics": "none"})
    assert "metrics" not in silent.to_dict()
    plain = client.completions.create(**asked, extra_body={"num_speculative_tokens": 0})
    assert "metrics" not in plain.to_dict()
    assert plain.choices[0].text == silent.choices[0].text


def test_named_and_required_calls_keep_to_their_schemas(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "feed"}}
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "tools": TOOLS, "max_tokens": MAX_TOKENS, "seed": 3}
    for choice, names in ((named, {"feed"}), ("required", {"greet", "feed"})):
        asked.update(tool_choice=choice, parallel_tool_calls=False)
        answer = client.chat.completions.create(**asked).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), PERSON)
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        (same,) = streamed.message.tool_calls or ()
        assert streamed.finish_reason == "tool_calls"
        assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
        assert same.id.startswith("call_")


def test_tools_that_nobody_calls_leave_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "seed": 3}
    plain = client.chat.completions.create(**asked).choices[0]
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(**asked, tools=TOOLS, tool_choice=choice).choices[0]
        assert (answer.message.content, answer.message.tool_calls) == (plain.message.content, None)
        assert answer.finish_reason == plain.finish_reason


def test_json(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    for seed in (1, 2, 3):
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT, response_format=form, max_tokens=MAX_TOKENS, seed=seed
        ).choices[0]
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content or ""), PERSON)
    begun = client.chat.completions.create(
        model="tiny", messages=CHAT, response_format={"type": "json_object"}, max_tokens=24, seed=1
    ).choices[0]
    assert (begun.message.content or "").startswith("{")
    for body, allowed in (
        ({"structured_outputs": {"choice": ["yes", 'no "really"\n']}}, {"yes", 'no "really"\n'}),
        ({"structured_outputs": {"regex": "a[bc]d"}}, {"abd", "acd"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
    ):
        choice = client.completions.create(model="tiny", prompt="Say", max_tokens=24, extra_body=body).choices[0]
        assert choice.text in allowed


def test_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "seed": 5}
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **asked)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert chat.usage is not None
    assert len(content) == chat.usage.completion_tokens
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes or ()).decode() == entry.token
    streamed = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, stream=True, **asked)
    tokens = [
        entry
        for chunk in streamed
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or []
    ]
    assert tokens == content

    text = client.completions.create(prompt="The with statement", logprobs=2, echo=True, **asked).choices[0]
    assert text.logprobs is not None
    found = text.logprobs
    assert found.tokens is not None
    assert "".join(found.tokens) == text.text
    assert text.text.startswith("The with statement")
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])
    assert found.text_offset == [len("".join(found.tokens[:index])) for index in range(len(found.tokens))]
    scored = client.completions.create(prompt="The with", extra_body={"prompt_logprobs": 1}, **asked).choices[0]
    entries: Any = scored.to_dict()["prompt_logprobs"]
    assert entries[0] is None
    assert all(1 in {entry["rank"] for entry in each.values()} for each in entries[1:])


def test_n_stop_bias_and_bans(client: openai.OpenAI) -> None:
    several = client.chat.completions.create(model="tiny", messages=CHAT, n=3, max_tokens=16, seed=11)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    parts = ["", "", ""]
    for chunk in client.chat.completions.create(model="tiny", messages=CHAT, n=3, max_tokens=16, seed=11, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert parts == [choice.message.content for choice in several.choices]

    asked: dict[str, Any] = {"model": "tiny", "prompt": "The with", "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**asked, logprobs=0).choices[0]
    assert plain.logprobs is not None
    stop = (plain.logprobs.tokens or [])[3]
    stopped = client.completions.create(**asked, stop=stop).choices[0]
    assert stop not in stopped.text
    assert plain.text.startswith(stopped.text)
    assert (stopped.finish_reason, stopped.to_dict()["stop_reason"]) == ("stop", stop)
    kept = client.completions.create(**asked, stop=[stop], extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == stopped.text + stop
    body = {"allowed_token_ids": [5, 6], "ignore_eos": True}
    narrow = client.completions.create(**asked, extra_body=body, logprobs=0).choices[0]
    assert narrow.logprobs is not None
    assert len(set(narrow.logprobs.tokens or [])) <= 2
    biased = client.completions.create(**asked, logit_bias={"5": 100}, extra_body={"ignore_eos": True}, logprobs=0)
    assert biased.choices[0].logprobs is not None
    assert len(set(biased.choices[0].logprobs.tokens or [])) == 1
    for extra in ({"top_k": -1}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"min_tokens": 12}, {"bad_words": ["a"]}):
        drawn = client.completions.create(**{**asked, "temperature": 1}, extra_body={**extra, "ignore_eos": True})
        assert drawn.choices[0].text


def test_errors_are_those_of_openai(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=CHAT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=CHAT, top_p=2)
    assert (wrong.value.param, wrong.value.type) == ("top_p", "invalid_request_error")
    assert "above 0 and at most 1" in str(wrong.value)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="tiny", messages=CHAT, stream=True, extra_body={"nonesuch": 1})
    assert unknown.value.param == "nonesuch"


def test_langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Pet(BaseModel):
        """A pet."""

        name: str = Field(max_length=8)
        legs: int = Field(ge=0, le=8)

    model = ChatOpenAI(base_url=url, api_key="none", model="tiny", max_tokens=MAX_TOKENS, seed=4, max_retries=0)
    answer = model.invoke("What is a decorator?")
    assert answer.text
    assert answer.usage_metadata is not None
    assert "".join(part.text for part in model.stream("What is a decorator?")) == answer.text
    for method in ("json_schema", "function_calling"):
        pet = model.with_structured_output(Pet, method=method).invoke("A pet, please.")
        assert isinstance(pet, Pet)

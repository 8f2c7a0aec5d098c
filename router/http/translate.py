"""From a request over HTTP to one of the frontend: same meaning, same checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import InvalidRequest
from outrider.core.sampling import Verifier
from outrider.router.http.errors import PROMPT_FIELDS
from outrider.router.http.fields import ChatRequest, CommonRequest, CompletionRequest, Message, TextPart
from outrider.router.http.tools import forced_schema, template_tools, wanted_functions
from outrider.router.limits import MAX_CHOICES
from outrider.router.tokenizer import TextTokenizer
from outrider.v1 import common_pb2, generation_pb2

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI and vLLM have it
MAX_PROMPTS = 1024  # of one request
MAX_COPIED_BYTES = 16 << 20  # of what stands beside the prompts of one request: each prompt gets a copy

# Fields of the same name and meaning; the second ones repeat.
_CONTROLS = ("min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
_LISTS = ("bad_words", "allowed_token_ids", "banned_token_ids")


@dataclass(frozen=True)
class Translated:
    """What the frontend is asked: one request for each prompt.

    Attributes:
        requests: without an id.
        names: how the client spells the frontend's fields (``errors.spelt``).
        prompt_names: the same for the prompt alone, one for each request.
    """

    requests: tuple[generation_pb2.GenerateRequest, ...]
    names: Mapping[str, str]
    prompt_names: tuple[Mapping[str, str], ...] = field(default=({},))


def translate_completion(request: CompletionRequest) -> Translated:
    """Raises ``InvalidRequest``."""
    names = {"prompt": "prompt"}
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of", request.best_of, "absent or equal to n: choices are not ranked here")
    common = _common(request, names)
    common.max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    common.echo = bool(request.echo)
    if request.logprobs is not None:
        common.sampling.logprobs = request.logprobs
        if request.echo:
            common.sampling.prompt_logprobs = max(request.logprobs, request.prompt_logprobs or 0)
    prompts, spelt = _prompts(request)
    beside = common.ByteSize()
    if len(prompts) > 1 and beside * len(prompts) > MAX_COPIED_BYTES:
        raise InvalidRequest(
            "prompt",
            f"{len(prompts)} prompts with {beside} bytes of other fields",
            f"fewer, or with less beside them: those bytes count for each, and may be {MAX_COPIED_BYTES} in all",
        )
    requests = []
    for prompt in prompts:
        message = generation_pb2.GenerateRequest()
        message.CopyFrom(common)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(prompt)
        requests.append(message)
    prompt_names = tuple({name: at for name in PROMPT_FIELDS} for at in spelt)
    return Translated(tuple(requests), names, prompt_names)


def translate_chat(request: ChatRequest, tokenizer: TextTokenizer) -> Translated:
    """Raises ``InvalidRequest``."""
    names = {name: "messages" for name in PROMPT_FIELDS}
    names["sampling.logprobs"] = "top_logprobs"
    functions = wanted_functions(request)
    message = _common(request, names, forced=forced_schema(request, functions))
    limit = request.max_completion_tokens
    if limit is not None:
        if request.max_tokens not in (None, limit):
            raise InvalidRequest("max_tokens", request.max_tokens, f"absent or max_completion_tokens, which is {limit}")
        names["max_tokens"] = "max_completion_tokens"
        message.max_tokens = limit
    elif request.max_tokens is not None:
        message.max_tokens = request.max_tokens
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs", request.top_logprobs, "absent or 0 unless logprobs is true")
    if request.logprobs:
        message.sampling.logprobs = request.top_logprobs or 0
    if not request.messages:
        raise InvalidRequest("messages", [], "at least one message")
    extra = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", request.reasoning_effort)
    text = tokenizer.render_chat(
        [template_message(item, f"messages[{index}]") for index, item in enumerate(request.messages)],
        tools=template_tools(request, functions),
        extra=extra,
    )
    message.token_ids.SetInParent()
    message.token_ids.ids.extend(tokenizer.encode(text, add_special_tokens=False))
    return Translated((message,), names)


def template_message(message: Message, spelt: str) -> dict[str, Any]:
    """A message as chat templates take it. Raises ``InvalidRequest``.

    A developer's message is one of the system: templates rarely know the newer word, and some drop what they do not
    know. The arguments of calls are objects there, where clients send them as text.
    """
    content = message.refusal if message.content is None and message.role == "assistant" else message.content
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise InvalidRequest(f"{spelt}.content", None, "a text or a list of parts of type 'text'")
    if isinstance(content, list):
        content = "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
    role = "system" if message.role == "developer" else message.role
    entry: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        entry["tool_calls"] = []
        for index, call in enumerate(message.tool_calls):
            called = call.function
            where = f"{spelt}.tool_calls[{index}].function.arguments"
            try:
                arguments = json.loads(called.arguments or "{}", parse_float=_number, parse_constant=_number)
                json.dumps(arguments, ensure_ascii=False).encode()  # an escape may stand for half a character
            except RecursionError as error:
                raise InvalidRequest(where, called.arguments, "JSON that is nested less deeply") from error
            except ValueError as error:
                raise InvalidRequest(where, called.arguments, f"JSON ({error})") from error
            entry["tool_calls"].append(
                {"id": call.id, "type": "function", "function": {"name": called.name, "arguments": arguments}}
            )
    return entry


def _number(text: str) -> float:
    """JSON knows no infinity; what only looks like a number must not become one. Raises ``ValueError``."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number that can be held")
    return number


def _json_text(value: Any, spelt: str) -> str:
    """The JSON of a value that came as JSON. Raises ``InvalidRequest`` for what JSON cannot tell on."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise InvalidRequest(spelt, "what it is", f"without numbers that cannot be held ({error})") from error


def _common(
    request: CommonRequest, names: dict[str, str], forced: dict[str, Any] | None = None
) -> generation_pb2.GenerateRequest:
    message = generation_pb2.GenerateRequest(
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or (),
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=bool(request.ignore_eos),
        include_stop=bool(request.include_stop_str_in_output),
    )
    if isinstance(request.stop, str):
        names["stop[0]"] = "stop"
    if request.n is not None:
        if not 1 <= request.n <= MAX_CHOICES:  # before anybody makes room for so many
            raise InvalidRequest("n", request.n, f"from 1 to {MAX_CHOICES}")
        message.n = request.n
    if request.num_speculative_tokens is not None:
        message.num_speculative_tokens = request.num_speculative_tokens
    sampling = message.sampling
    for name in ("temperature", "top_p", "prompt_logprobs", *_CONTROLS):
        value = getattr(request, name)
        if value is not None:
            setattr(sampling, name, value)
    for name in _LISTS:
        getattr(sampling, name).extend(getattr(request, name) or ())
    sampling.top_k = max(0, request.top_k or 0)  # -1 is vLLM's word for all
    if request.seed is not None:
        sampling.seed = request.seed % 2**64
    if request.verifier is not None:
        sampling.verifier = int(Verifier[request.verifier.upper()])  # type: ignore[assignment]
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal()) or int(key) >= 2**32:
            raise InvalidRequest("logit_bias", key, "an object whose keys are token ids")
        sampling.logit_bias[int(key)] = bias
    grammar = _grammar(request, names, forced)
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar)
    return message


def _grammar(request: CommonRequest, names: dict[str, str], forced: dict[str, Any] | None) -> common_pb2.Grammar | None:
    """The language that is asked for, by whichever field; ``names`` learns which. Raises ``InvalidRequest``."""
    asked: dict[str, common_pb2.Grammar] = {}
    if forced is not None:
        asked["tools"] = common_pb2.Grammar(json_schema=_json_text(forced, "tools"))
    form = request.response_format
    if form is not None and form.type == "json_object":
        asked["response_format"] = common_pb2.Grammar(json_schema='{"type": "object"}')
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise InvalidRequest("response_format.json_schema", None, "given with type 'json_schema'")
        if form.json_schema.schema_ is None:
            raise InvalidRequest("response_format.json_schema.schema", None, "a JSON schema")
        spelt = "response_format.json_schema.schema"
        asked[spelt] = common_pb2.Grammar(json_schema=_json_text(form.json_schema.schema_, spelt))
    outputs = request.structured_outputs
    if outputs is not None:
        for name, value in (
            ("json", outputs.json_),
            ("regex", outputs.regex),
            ("choice", outputs.choice),
            ("grammar", outputs.grammar),
            ("json_object", outputs.json_object or None),
        ):
            if value is not None:
                asked[f"structured_outputs.{name}"] = _language(name, value, f"structured_outputs.{name}")
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{name}")
        if value is not None:
            asked[f"guided_{name}"] = _language(name, value, f"guided_{name}")
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise InvalidRequest(second, "set", f"absent: {first} says already what the output may be")
    for field_name, grammar in asked.items():
        names["sampling.grammar"] = field_name
        names[f"sampling.grammar.{grammar.WhichOneof('kind')}"] = field_name
        return grammar
    return None


def _language(name: str, value: Any, spelt: str) -> common_pb2.Grammar:
    if name == "json":
        return common_pb2.Grammar(json_schema=value if isinstance(value, str) else _json_text(value, spelt))
    if name == "json_object":
        return common_pb2.Grammar(json_schema='{"type": "object"}')
    if name == "regex":
        return common_pb2.Grammar(regex=value)
    if name == "choice":
        if not value or not all(value):
            raise InvalidRequest(spelt, value, "at least one text, none of them empty")
        return common_pb2.Grammar(ebnf="start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value))
    return common_pb2.Grammar(ebnf=value)


def _prompts(request: CompletionRequest) -> tuple[list[str | list[int]], list[str]]:
    """The prompts, and how the client spells each."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt], ["prompt"]
    if not prompt:
        raise InvalidRequest("prompt", [], "a text, a list of token ids, or a list of either, of at least one")
    if len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise InvalidRequest("prompt", f"{len(prompt)} prompts", f"at most {MAX_PROMPTS} prompts")
    if isinstance(prompt[0], int):
        return [prompt], ["prompt"]
    return list(prompt), [f"prompt[{index}]" for index in range(len(prompt))]

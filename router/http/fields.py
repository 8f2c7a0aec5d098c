"""What requests over HTTP may hold: OpenAI's fields, and the further ones that vLLM knows, under its names.

Types and shapes are checked here, values at the door of the frontend like those of every other request. A field that is
not listed is refused; the comment ``no effect`` marks those that are taken and change nothing here. Of features
that are not there, fields are listed with the values that ask for nothing, and ``UNSUPPORTED`` says what to do instead.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
Json = dict[str, Any]
# A long list that is wrong throughout is told of once.
TokenIds = Annotated[list[UInt32], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


# Top-level fields of features that are not there.
UNSUPPORTED = {
    "audio": "answers are text",
    "web_search_options": "nothing is looked up on the web",
    "moderation": "nothing is moderated",
    "functions": "send 'tools' instead",
    "function_call": "send 'tool_choice' instead",
    "suffix": "text is continued, not filled in",
    "use_beam_search": "there is no beam search",
    "length_penalty": "there is no beam search",
    "early_stopping": "there is no beam search",
    "priority": "requests are served in the order in which they come",
    "truncate_prompt_tokens": "send a prompt that fits",
    "cache_salt": "the prefix cache is one for all clients",
    "logits_processors": "no code of clients runs here",
    "return_token_ids": "the gRPC API tells token ids",
    "return_tokens_as_token_ids": "the gRPC API tells token ids",
    "echo": "it goes with /v1/completions",
    "add_generation_prompt": "the assistant speaks next",
    "continue_final_message": "the assistant speaks next",
    "add_special_tokens": "the model's own rule holds",
    "chat_template": "the model's own template holds",
    "documents": "put them into messages",
    "modalities": "answers are text",
    "skip_special_tokens": "special tokens have no text",
}


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(_Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no effect


class JsonSchema(_Fields):
    name: str
    description: str | None = None  # no effect
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None  # no effect: output always keeps to the schema


class ResponseFormat(_Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Fields):
    """vLLM's ``structured_outputs``: one of them."""

    json_: Json | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Function(_Fields):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None  # no effect: forced calls always keep to the schema


class Tool(_Fields):
    type: Literal["function"]
    function: Function


class _ChosenFunction(_Fields):
    name: str


class ChosenTool(_Fields):
    type: Literal["function"]
    function: _ChosenFunction


class _Part(_Fields):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)  # hints for caches, say, have no effect


class TextPart(_Part):
    type: Literal["text"]
    text: str


class RefusalPart(_Part):
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(_Fields):
    name: str
    arguments: str = ""


class ToolCall(_Fields):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # no effect


class Message(_Fields):
    # Clients send answers back as they got them: what they may hold beyond these has no effect.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class CommonRequest(_Fields):
    """What both kinds of request have in common."""

    model: str | None = None
    n: UInt32 | None = None
    max_tokens: UInt32 | None = None
    stop: str | Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None  # no effect
    # As vLLM has them.
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: UInt32 | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    request_id: str | None = None
    session_id: str | None = None  # no effect: prefixes are found by themselves
    skip_special_tokens: Literal[True] | None = None  # no effect
    spaces_between_special_tokens: bool | None = None  # no effect
    # Our own.
    typical_p: float | None = None
    banned_token_ids: TokenIds | None = None
    num_speculative_tokens: UInt32 | None = None
    verifier: Literal["greedy", "rejection", "coupled"] | None = None
    per_request_spec_decode_metrics: Literal["none", "summary"] | None = None
    # What others have and we do not: taken where it asks for nothing.
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    early_stopping: Literal[False] | None = None
    priority: Literal[0] | None = None
    truncate_prompt_tokens: None = None
    cache_salt: None = None
    logits_processors: None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None


class CompletionRequest(CommonRequest):
    """``/v1/completions``."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: UInt32 | None = None
    best_of: UInt32 | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: Literal[True] | None = None


class ChatRequest(CommonRequest):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(fail_fast=True)]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None  # no effect
    audio: None = None
    web_search_options: None = None
    moderation: None = None
    functions: None = None
    function_call: None = None
    echo: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    chat_template: None = None
    documents: None = None
    metadata: Json | None = None  # no effect
    store: bool | None = None  # no effect
    service_tier: str | None = None  # no effect
    safety_identifier: str | None = None  # no effect
    prompt_cache_key: str | None = None  # no effect
    prompt_cache_options: Json | None = None  # no effect
    prompt_cache_retention: str | None = None  # no effect
    include_reasoning: bool | None = None  # no effect: the text is told as it is
    prediction: Json | None = None  # no effect: drafts need no hint
    verbosity: str | None = None  # no effect

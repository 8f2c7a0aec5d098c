"""From Python values to a request. What a field cannot hold is refused here, by its name; the server does the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

from outrider.client._controls import CONTROL_NAMES, set_controls
from outrider.client._values import flag, items, json_text, number, shown, text, unsigned
from outrider.core.errors import InvalidRequest
from outrider.core.grammar import GrammarKind
from outrider.core.logprobs import LogprobsMode
from outrider.core.sampling import Verifier
from outrider.v1 import generation_pb2

Message = Mapping[str, str]
"""One message of a chat: ``{"role": "user", "content": "..."}``."""

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or a chat."""


class Options(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``. Absent or None: the server's default.

    A control of ``outrider.controls`` that is not listed is taken by its name all the same; a type checker that does
    not know it wants it in ``controls``.

    Keys:
        max_tokens: output tokens wanted; default: as many as the context holds.
        temperature: 0 means greedy; default 1.0.
        top_k: sample from that many most likely tokens; default: all.
        top_p: sample from the most likely tokens of that mass together; default 1.0.
        min_p: drop tokens less likely than this share of the most likely one.
        typical_p: keep the most typical tokens of that mass together.
        repetition_penalty: above 1 makes tokens of prompt and output less likely.
        presence_penalty: taken from the logits of each token of the output.
        frequency_penalty: taken from them for each time it occurs.
        logit_bias: {token id: what is added to its logit}.
        bad_words: words that the output must not hold.
        allowed_token_ids: only these tokens.
        banned_token_ids: none of these tokens.
        min_tokens: output tokens before which nothing ends the text.
        controls: further controls by name.
        json_schema: the output is JSON of this schema, given as a dictionary or as text.
        regex: the output matches this regular expression as a whole.
        ebnf: the output belongs to this grammar, in Lark's notation or GBNF.
        seed: 64 bits; default: the server picks one and the completion tells it.
        verifier: "greedy", "rejection" or "coupled".
        n: choices to generate; default 1.
        stop: strings that end the text; it ends before them.
        stop_token_ids: tokens that end the text.
        ignore_eos: the model's own end-of-text tokens do not end the text.
        include_stop: leave the stop string, or the text of the stop token, in the text.
        echo: tell the prompt's text too (``Completion.prompt_text``; a stream's texts start with it).
        logprobs: log-probabilities of the output's tokens, with that many most likely ones beside each.
        prompt_logprobs: the same for the prompt.
        logprobs_mode: "raw" (the model's own, the default) or "processed" (of what is sampled from); those of the
            prompt are raw always.
        num_speculative_tokens: proposed tokens for each round; 0 turns speculation off.
        request_id: yours; default: the server makes one.
        timeout: seconds that the whole request may take; default: the client's.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: str | Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int] | None
    min_tokens: int | None
    controls: Mapping[str, Any] | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    ebnf: str | None
    seed: int | None
    verifier: str | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    echo: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: str | None
    num_speculative_tokens: int | None
    request_id: str | None
    timeout: float | None


def build_request(prompt: Prompt, **options: Unpack[Options]) -> generation_pb2.GenerateRequest:
    """The message of a request. Raises ``InvalidRequest``, and ``TypeError`` for options that do not exist."""
    unknown = set(options) - set(Options.__annotations__) - CONTROL_NAMES
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request = generation_pb2.GenerateRequest(request_id=text("request_id", given.get("request_id", "")))
    _set_prompt(request, prompt)
    for name in ("max_tokens", "num_speculative_tokens", "n"):
        if name in given:
            setattr(request, name, unsigned(name, given[name], 32))
    for name in ("ignore_eos", "include_stop", "echo"):
        if name in given:
            setattr(request, name, flag(name, given[name]))
    stop = given.get("stop", ())
    for index, string in enumerate([stop] if isinstance(stop, str) else items("stop", stop, "strings")):
        request.stop.append(text(f"stop[{index}]", string))
    for index, token in enumerate(items("stop_token_ids", given.get("stop_token_ids", ()), "token ids")):
        request.stop_token_ids.append(unsigned(f"stop_token_ids[{index}]", token, 32))
    _set_sampling(request.sampling, given)
    return request


def verifier_number(field: str, name: str) -> int:
    """Raises ``InvalidRequest`` unless it is the name of a verifier."""
    try:
        return int(Verifier[name.upper()])
    except (KeyError, AttributeError):
        raise InvalidRequest(field, name, "'greedy', 'rejection' or 'coupled'") from None


def _set_sampling(sampling: generation_pb2.SamplingParams, given: Mapping[str, Any]) -> None:
    if "temperature" in given:
        sampling.temperature = number("sampling.temperature", given["temperature"], "0 (greedy) or a finite number")
    if "top_p" in given:
        sampling.top_p = number("sampling.top_p", given["top_p"], "above 0 and at most 1")
    if "top_k" in given:
        sampling.top_k = unsigned("sampling.top_k", given["top_k"], 32)
    if "seed" in given:
        sampling.seed = unsigned("sampling.seed", given["seed"], 64)
    if "verifier" in given:
        sampling.verifier = cast(Any, verifier_number("sampling.verifier", given["verifier"]))
    for name in ("logprobs", "prompt_logprobs"):
        if name in given:
            setattr(sampling, name, unsigned(f"sampling.{name}", given[name], 32))
    if "logprobs_mode" in given:
        sampling.logprobs_mode = cast(Any, _mode_number(given["logprobs_mode"]))
    set_controls(sampling, _controls(given))
    _set_grammar(sampling, given)


def _controls(given: Mapping[str, Any]) -> dict[str, Any]:
    """Controls given as keywords and those in ``controls``, together."""
    named = {name: value for name, value in given.items() if name in CONTROL_NAMES}
    further = given.get("controls", {})
    if not isinstance(further, Mapping):
        raise InvalidRequest("sampling.controls", shown(further), "a mapping of names to values")
    for name in further:
        if name in named:
            raise InvalidRequest(f"sampling.{name}", shown(further[name]), "given once only")
    return named | {name: value for name, value in further.items() if value is not None}


def _set_grammar(sampling: generation_pb2.SamplingParams, given: Mapping[str, Any]) -> None:
    kinds = [kind.value for kind in GrammarKind if kind.value in given]
    if len(kinds) > 1:
        raise InvalidRequest("sampling.grammar", " and ".join(kinds), "one of json_schema, regex and ebnf")
    for kind in kinds:
        field = f"sampling.grammar.{kind}"
        convert = json_text if kind == GrammarKind.JSON_SCHEMA.value else text
        setattr(sampling.grammar, kind, convert(field, given[kind]))


def _mode_number(name: Any) -> int:
    try:
        return int(LogprobsMode[name.upper()])
    except (KeyError, AttributeError):
        raise InvalidRequest("sampling.logprobs_mode", shown(name), "'raw' or 'processed'") from None


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = text("text", prompt)
    elif isinstance(prompt, bytes | bytearray):  # a sequence of integers, but hardly meant as token ids
        raise InvalidRequest("text", bytes(prompt[:60]), "a string, not bytes")
    elif len(prompt) and all(isinstance(item, Mapping) for item in prompt):
        for index, message in enumerate(cast(Sequence[Message], prompt)):
            if set(message) != {"role", "content"}:
                raise InvalidRequest(f"chat.messages[{index}]", dict(message), "of the keys 'role' and 'content'")
            request.chat.messages.add(
                role=text(f"chat.messages[{index}].role", message["role"]),
                content=text(f"chat.messages[{index}].content", message["content"]),
            )
    else:
        ids = [unsigned(f"token_ids.ids[{index}]", token, 32) for index, token in enumerate(prompt)]
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(ids)

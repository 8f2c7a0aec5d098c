"""The door: a request as it came becomes one that can run, or is refused with the name of the field."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.controls import Facts
from outrider.core.errors import InvalidRequest
from outrider.router.limits import (
    check_ends,
    check_request_id,
    check_token_ids,
    checked_num_choices,
    checked_num_speculative_tokens,
    checked_stop,
    checked_stop_token_ids,
)
from outrider.router.requests import NewRequest
from outrider.router.sampling_params import CheckGrammar, Defaults, given_controls, sampling_from_params
from outrider.router.tokenizer import TextTokenizer
from outrider.v1 import generation_pb2


@dataclass(frozen=True)
class Admitted:
    """A request that can run, and how its answer is to be written.

    Attributes:
        request: what the group is asked for.
        include_stop: whether a stop string, or the text of a stop token, stays in the text.
        echo: what the answer begins with; None for nothing.
    """

    request: NewRequest
    include_stop: bool = False
    echo: str | None = None


def admit(
    request: generation_pb2.GenerateRequest,
    *,
    request_id: str,
    tokenizer: TextTokenizer,
    check_grammar: CheckGrammar,
    max_model_len: int | None,
    defaults: Defaults,
    deadline: float | None,
) -> Admitted:
    """Check every field and fill in every default. Raises ``InvalidRequest``.

    ``max_model_len`` is None where only the group's owner knows it. ``generation`` is left 0: the group sets it.
    """
    check_request_id(request.request_id)
    prompt = _prompt(request, tokenizer)
    if max_model_len is not None and len(prompt) >= max_model_len:
        raise InvalidRequest(
            request.WhichOneof("prompt") or "prompt",
            f"a prompt of {len(prompt)} tokens",
            f"at most {max_model_len - 1} tokens long: the context holds {max_model_len}",
        )
    max_tokens = _max_tokens(request)
    stop, stop_token_ids = checked_stop(request), checked_stop_token_ids(request, tokenizer.vocab_size)
    eos_token_ids: frozenset[int] = frozenset() if request.ignore_eos else tokenizer.eos_token_ids
    given = given_controls(request.sampling)
    sampling = sampling_from_params(
        request.sampling,
        given,
        defaults=defaults,
        facts=Facts(
            vocab_size=tokenizer.vocab_size,
            end_token_ids=eos_token_ids | stop_token_ids,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        ),
        prompt_len=len(prompt),
        check_grammar=check_grammar,
    )
    min_tokens = int(given.get("min_tokens") or 0)
    check_ends(
        sampling,
        ignore_eos=request.ignore_eos,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        min_tokens_field=given.spelt("min_tokens"),
    )
    admitted = NewRequest(
        request_id=request_id,
        generation=0,
        prompt_tokens=tuple(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        num_choices=checked_num_choices("n", request.n if request.HasField("n") else 1, sampling),
        eos_token_ids=eos_token_ids,
        stop_token_ids=stop_token_ids,
        stop=stop,
        num_speculative_tokens=checked_num_speculative_tokens(request),
        deadline=deadline,
    )
    echo = (request.text or tokenizer.decode(prompt)) if request.echo else None
    return Admitted(admitted, include_stop=request.include_stop, echo=echo)


def _prompt(request: generation_pb2.GenerateRequest, tokenizer: TextTokenizer) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        if not request.text:
            raise InvalidRequest("text", "", "at least one character long")
        tokens = tokenizer.encode(request.text)
    elif kind == "token_ids":
        tokens = list(request.token_ids.ids)
        check_token_ids("token_ids.ids", tokens, tokenizer.vocab_size)
    elif kind == "chat":
        tokens = _chat(request.chat, tokenizer)
    else:
        raise InvalidRequest("prompt", None, "one of text, token_ids and chat")
    if not tokens:
        raise InvalidRequest("token_ids.ids" if kind == "token_ids" else kind, [], "at least one token long")
    return tokens


def _chat(chat: generation_pb2.ChatMessages, tokenizer: TextTokenizer) -> list[int]:
    if not chat.messages:
        raise InvalidRequest("chat.messages", [], "at least one message")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f"chat.messages[{index}].role", "", "a role, such as 'user'")
    return tokenizer.encode_chat([{"role": item.role, "content": item.content} for item in chat.messages])


def _max_tokens(request: generation_pb2.GenerateRequest) -> int | None:
    if not request.HasField("max_tokens"):
        return None
    if request.max_tokens == 0:
        raise InvalidRequest("max_tokens", 0, "at least 1, or absent for as many as the context holds")
    return request.max_tokens

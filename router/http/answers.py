"""From what the frontend says to OpenAI's answers, whole or as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider import __version__
from outrider.core.sampling import Verifier
from outrider.router.http.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from outrider.router.http.tools import CallPiece, Piece, TextPiece, ToolParser
from outrider.v1 import generation_pb2, group_pb2

Json = dict[str, Any]

_REASONS = {
    group_pb2.FINISH_REASON_STOP: "stop",
    group_pb2.FINISH_REASON_LENGTH: "length",
    group_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True)
class Delta:
    """What became known of one choice, in one go."""

    index: int
    pieces: tuple[Piece, ...] = ()
    logprobs: tuple[generation_pb2.TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass
class _Choice:
    parser: ToolParser | None
    num_tokens: int = 0
    num_calls: int = 0
    text: list[str] = field(default_factory=list)
    calls: dict[int, Json] = field(default_factory=dict)
    logprobs: list[generation_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass(frozen=True)
class AnswerSettings:
    """How the answer is to look.

    Attributes:
        id: of the answer.
        model: name of the model.
        num_prompts: prompts, each of which has ``num_choices`` choices.
        with_logprobs: whether log-probabilities are asked for.
        with_prompt_logprobs: whether those of the prompt are to have a field of their own.
        with_metrics: whether to tell what speculation did.
        with_usage: whether the last chunk of a stream tells usage; the others have the field too, with null.
    """

    id: str
    model: str
    num_prompts: int = 1
    num_choices: int = 1
    with_logprobs: bool = False
    with_prompt_logprobs: bool = False
    with_metrics: bool = False
    with_usage: bool = False


class Answer:
    """Collects one answer. ``take`` says what each response adds, ``body`` and the chunks how it is written."""

    object_name = ""
    chunk_name = ""

    def __init__(self, settings: AnswerSettings, parsers: Sequence[ToolParser | None] = ()) -> None:
        self.settings = settings
        count = settings.num_prompts * settings.num_choices
        self._choices = [_Choice(parsers[index] if parsers else None) for index in range(count)]
        self._created = int(time.time())
        self._prompt_tokens = 0
        self._cached: dict[int, int] = {}  # of each prompt, once a choice of it has ended
        self._prompts: dict[int, generation_pb2.Prompt] = {}
        self._started: generation_pb2.Started | None = None
        self._finish: group_pb2.Finish | None = None

    def take(self, prompt: int, response: generation_pb2.GenerateResponse) -> Iterator[Delta]:
        """Note what a response to one of the prompts says."""
        first = prompt * self.settings.num_choices
        event = response.WhichOneof("event")
        if event == "started":
            self._started = response.started
            self._prompt_tokens += response.started.prompt_tokens
        elif event == "prompt":
            self._prompts[prompt] = response.prompt
            if response.prompt.text:
                for index in range(first, first + self.settings.num_choices):
                    scored = tuple(response.prompt.logprobs) if self.settings.with_logprobs else ()
                    yield self._noted(Delta(index, (TextPiece(response.prompt.text),), scored))
        elif event == "delta":
            choice = self._choices[first + response.delta.choice]
            choice.num_tokens += len(response.delta.token_ids)
            pieces = tuple(self._pieces(choice, response.delta.text))
            if pieces or response.delta.logprobs:
                logprobs = tuple(response.delta.logprobs)
                yield self._noted(Delta(first + response.delta.choice, pieces, logprobs))
        elif event == "finished":
            self._cached[prompt] = response.finished.finish.cached_prompt_tokens
            yield self._noted(self._end(first + response.finished.choice, response.finished))

    def body(self) -> Json:
        """The whole answer, after the last response."""
        body = self._head(self.object_name)
        body["choices"] = [self.whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        body["usage"] = self.usage()
        return self._with_metrics(body)

    def chunk(self, delta: Delta, *, with_usage: bool = False) -> Json:
        """One chunk of a stream."""
        chunk = self.empty_chunk()
        chunk["choices"] = [self.part_of_choice(delta)]
        if with_usage:
            chunk["usage"] = self.usage()
        return chunk

    def empty_chunk(self) -> Json:
        chunk = self._head(self.chunk_name)
        return {**chunk, "usage": None} if self.settings.with_usage else chunk

    def first_chunks(self) -> Iterator[Json]:
        """Chunks before there is any text."""
        return iter(())

    def usage_chunk(self) -> Json:
        """The last chunk, where usage is asked for."""
        chunk = self._head(self.chunk_name)
        chunk.update(choices=[], usage=self.usage())
        return self._with_metrics(chunk)

    def usage(self) -> Json:
        """Tokens so far, and at the end those of the prompts that the prefix cache held."""
        completion = sum(choice.num_tokens for choice in self._choices)
        usage: Json = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }
        if len(self._cached) == self.settings.num_prompts:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached.values())}
        return usage

    def whole_choice(self, index: int, choice: _Choice) -> Json:
        raise NotImplementedError

    def part_of_choice(self, delta: Delta) -> Json:
        raise NotImplementedError

    def _pieces(self, choice: _Choice, text: str) -> Iterable[Piece]:
        if choice.parser is None:
            return (TextPiece(text),) if text else ()
        return choice.parser.feed(text)

    def _end(self, index: int, finished: generation_pb2.Finished) -> Delta:
        choice, finish = self._choices[index], finished.finish
        self._finish = finish
        pieces = tuple(choice.parser.finish()) if choice.parser is not None else ()
        reason = _REASONS.get(finish.reason, "stop")
        calls = choice.num_calls + sum(isinstance(piece, CallPiece) for piece in pieces)
        if reason == "stop" and calls:
            reason = "tool_calls"
        return Delta(index, pieces, finish_reason=reason, stop_reason=finish.matched_stop or None)

    def _noted(self, delta: Delta) -> Delta:
        choice = self._choices[delta.index]
        choice.logprobs.extend(delta.logprobs)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        for piece in delta.pieces:
            if isinstance(piece, TextPiece):
                choice.text.append(piece.text)
            else:
                choice.num_calls += 1
                call = choice.calls.setdefault(piece.index, {"id": piece.id, "name": piece.name, "arguments": []})
                call["arguments"].append(piece.arguments)
        return delta

    def _head(self, name: str) -> Json:
        return {
            "id": self.settings.id,
            "object": name,
            "created": self._created,
            "model": self.settings.model,
            "system_fingerprint": f"outrider-{__version__}",
        }

    def _with_metrics(self, body: Json) -> Json:
        """As in vLLM only where all that was proposed was for one text, and there was something."""
        if self.settings.with_metrics and len(self._choices) == 1 and self._finish is not None:
            metrics = speculation_metrics(self._finish.speculation)
            if metrics is not None:
                body["metrics"] = {"speculative_decoding": metrics, "outrider": self._own_metrics(self._finish)}
        return body

    def _own_metrics(self, finish: group_pb2.Finish) -> Json:
        stats = finish.speculation
        return {
            "seed": self._started.seed if self._started is not None else None,
            "reproducible": finish.reproducible,
            "verifier": Verifier(stats.verifier).label,
            "drafter": stats.drafter,
            "target_calls": stats.target_calls,
        }


def speculation_metrics(stats: group_pb2.SpeculationStats) -> Json | None:
    """``metrics.speculative_decoding`` with vLLM's names; None where nothing was proposed."""
    steps, drafted, accepted = stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens
    if not steps:
        return None
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": list(stats.acceptance_histogram),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max(0, len(stats.acceptance_histogram) - 1),
    }


class CompletionAnswer(Answer):
    """``text_completion``."""

    object_name = chunk_name = "text_completion"

    def __init__(self, settings: AnswerSettings) -> None:
        super().__init__(settings)
        self._offsets = [0] * len(self._choices)

    def whole_choice(self, index: int, choice: _Choice) -> Json:
        entry = self._entry(index, "".join(choice.text), 0, choice.logprobs, choice.finish_reason, choice.stop_reason)
        if self.settings.with_prompt_logprobs:
            entry["prompt_logprobs"] = prompt_logprobs(self._prompts.get(index // self.settings.num_choices))
        return entry

    def part_of_choice(self, delta: Delta) -> Json:
        text = "".join(piece.text for piece in delta.pieces if isinstance(piece, TextPiece))
        offset = self._offsets[delta.index]
        self._offsets[delta.index] += sum(len(entry.token) for entry in delta.logprobs)
        return self._entry(delta.index, text, offset, delta.logprobs, delta.finish_reason, delta.stop_reason)

    def _entry(
        self,
        index: int,
        text: str,
        offset: int,
        entries: Sequence[generation_pb2.TokenLogprob],
        finish_reason: str | None,
        stop_reason: str | None,
    ) -> Json:
        logprobs = completion_logprobs(entries, offset) if self.settings.with_logprobs else None
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


class ChatAnswer(Answer):
    """``chat.completion``."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def body(self) -> Json:
        body = super().body()
        if self.settings.with_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._prompts.get(0))
        return body

    def first_chunks(self) -> Iterator[Json]:
        for index in range(len(self._choices)):
            chunk = self.empty_chunk()
            delta = {"role": "assistant", "content": ""}
            chunk["choices"] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
            yield chunk

    def whole_choice(self, index: int, choice: _Choice) -> Json:
        text = "".join(choice.text)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for call in choice.calls.values()
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs) if self.settings.with_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def part_of_choice(self, delta: Delta) -> Json:
        content: Json = {}
        text = "".join(piece.text for piece in delta.pieces if isinstance(piece, TextPiece))
        calls = [_call_delta(piece) for piece in delta.pieces if isinstance(piece, CallPiece)]
        if text:
            content["content"] = text
        if calls:
            content["tool_calls"] = calls
        part: Json = {"index": delta.index, "delta": content, "finish_reason": delta.finish_reason}
        part["logprobs"] = chat_logprobs(delta.logprobs) if delta.logprobs else None
        if delta.finish_reason is not None:
            part["stop_reason"] = delta.stop_reason
        return part


def _call_delta(piece: CallPiece) -> Json:
    function: Json = {"arguments": piece.arguments}
    call: Json = {"index": piece.index, "function": function}
    if piece.name is not None:
        function["name"] = piece.name
        call.update(id=piece.id, type="function")
    return call

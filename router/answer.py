"""What a client reads of a request: its choices' tokens as text, with their log-probabilities as text too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.core.errors import DeadlineExceeded, GenerationFailed
from outrider.core.logprobs import TokenLogprobs
from outrider.router.admission import Admitted
from outrider.router.requests import NewRequest
from outrider.router.text import TextStream
from outrider.router.tokenizer import TextTokenizer
from outrider.router.transcript import Update
from outrider.v1 import common_pb2, generation_pb2, group_pb2


class Answer:
    """Turns what a group says into what its client is told.

    Attributes:
        open_choices: choices whose text goes on.
    """

    def __init__(self, admitted: Admitted, tokenizer: TextTokenizer) -> None:
        self.open_choices = set(range(admitted.request.num_choices))
        self._admitted = admitted
        self._tokenizer = tokenizer
        self._choices = [_Choice(admitted, tokenizer) for _ in range(admitted.request.num_choices)]

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the first update of choice 0 must come before all others: it brings those of the prompt."""
        return self._admitted.request.sampling.prompt_logprobs is not None

    def begin(self, start: Update, group_id: str) -> Iterator[generation_pb2.GenerateResponse]:
        """What can be said before there is any output."""
        request = self._admitted.request
        started = generation_pb2.Started(
            seed=request.sampling.seed,
            verifier=int(request.sampling.verifier),  # type: ignore[arg-type]
            prompt_tokens=len(request.prompt_tokens),
            group_id=group_id,
        )
        yield self._response(start, started=started)
        if self._admitted.echo is not None and not self.needs_prompt_logprobs:
            yield self._response(start, prompt=self._prompt(()))

    def take(self, choice: int, update: Update) -> Iterator[generation_pb2.GenerateResponse]:
        """Raises ``GenerationFailed`` or ``DeadlineExceeded`` where the choice ended so."""
        if update.prompt_logprobs or (self.needs_prompt_logprobs and choice == 0 and self._choices[0].is_new):
            yield self._response(update, prompt=self._prompt(update.prompt_logprobs))
        state = self._choices[choice]
        text = state.text_of(update)
        if text or update.tokens:
            logprobs = [self._spelt(entry) for entry in update.logprobs]
            delta = generation_pb2.Delta(text=text, token_ids=update.tokens, choice=choice, logprobs=logprobs)
            yield self._response(update, delta=delta)
        if update.finish is not None:
            self.open_choices.discard(choice)
            finished = _finished(self._admitted.request, choice, update.finish, state.num_tokens)
            yield self._response(update, finished=finished)

    def _prompt(self, entries: Sequence[TokenLogprobs]) -> generation_pb2.Prompt:
        tokens = self._admitted.request.prompt_tokens
        prompt = generation_pb2.Prompt(text=self._admitted.echo or "", token_ids=tokens)
        if entries or (self.needs_prompt_logprobs and len(tokens) == 1):
            first = generation_pb2.TokenLogprob(token_id=tokens[0], token=self._tokenizer.token_text(tokens[0]))
            prompt.logprobs.extend([first, *(self._spelt(entry) for entry in entries)])
        return prompt

    def _spelt(self, entry: TokenLogprobs) -> generation_pb2.TokenLogprob:
        spell = self._tokenizer.token_text
        return generation_pb2.TokenLogprob(
            token_id=entry.token_id,
            token=spell(entry.token_id),
            logprob=entry.logprob,
            rank=entry.rank,
            top=[
                generation_pb2.TopLogprob(token_id=token, token=spell(token), logprob=logprob)
                for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        )

    def _response(self, update: Update, **event: Any) -> generation_pb2.GenerateResponse:
        return generation_pb2.GenerateResponse(
            header=common_pb2.Header(epoch=update.epoch, generation=update.generation),
            request_id=self._admitted.request.request_id,
            **event,
        )


class _Choice:
    """The text of one choice so far."""

    def __init__(self, admitted: Admitted, tokenizer: TextTokenizer) -> None:
        request = admitted.request
        self.num_tokens = 0
        self.is_new = True
        self._tokenizer = tokenizer
        self._spelt_ends = request.stop_token_ids if admitted.include_stop else frozenset()
        self._ends = request.eos_token_ids | request.stop_token_ids  # they end a text and are no part of it
        self._stream = TextStream(
            tokenizer.detokenizer(request.prompt_tokens),
            request.stop,
            min_tokens=request.min_tokens,
            include_stop=admitted.include_stop,
        )

    def text_of(self, update: Update) -> str:
        """The text that an update made final."""
        self.is_new = False
        self.num_tokens += len(update.tokens)
        text = self._stream.feed([token for token in update.tokens if token not in self._ends])
        if update.finish is None:
            return text
        ends = [token for token in update.tokens[-1:] if token in self._spelt_ends]
        text += self._stream.finish(ends)
        unspelt = self._tokenizer.special_ids | self._tokenizer.eos_token_ids  # without text in a stream
        return text + "".join(self._tokenizer.token_text(token) for token in ends if token in unspelt)


def _finished(request: NewRequest, choice: int, finish: group_pb2.Finish, num_tokens: int) -> generation_pb2.Finished:
    if finish.reason == group_pb2.FINISH_REASON_ERROR:
        raise GenerationFailed(f"request {request.request_id} failed: {finish.error_message}")
    if finish.reason == group_pb2.FINISH_REASON_DEADLINE:
        raise DeadlineExceeded(f"request {request.request_id} ran out of time after {num_tokens} tokens")
    return generation_pb2.Finished(
        finish=finish, prompt_tokens=len(request.prompt_tokens), completion_tokens=num_tokens, choice=choice
    )

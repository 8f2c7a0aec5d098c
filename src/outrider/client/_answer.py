"""From the messages of a stream to a completion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from outrider.client._completion import (
    Choice,
    Completion,
    Delta,
    Speculation,
    TokenLogprob,
    TopLogprob,
    Usage,
    timing_from,
)
from outrider.core.errors import OutriderError
from outrider.core.sampling import Verifier
from outrider.v1 import generation_pb2, group_pb2

FINISH_REASONS = {
    group_pb2.FINISH_REASON_STOP: "stop",
    group_pb2.FINISH_REASON_LENGTH: "length",
    group_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass
class _OpenChoice:
    """What came of one choice so far; ``arrivals`` are the times, in seconds, at which its tokens came."""

    deltas: list[Delta] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)


class Answer:
    """What a stream has said so far.

    Attributes:
        request_id: known from the first message on.
        num_choices: as many as were asked for.
        prompt_text: known once the server has sent it; None where it was not asked for.
    """

    def __init__(self, request: generation_pb2.GenerateRequest, begun: float) -> None:
        """``begun``: when the request was sent, in seconds of the clock that ``take`` is given."""
        self.request_id = request.request_id
        self.num_choices = request.n or 1
        self.prompt_text: str | None = None
        self._begun = begun
        self._wants_echo = request.echo
        self._wants_logprobs = request.sampling.HasField("logprobs")
        self._wants_prompt_logprobs = request.sampling.HasField("prompt_logprobs")
        self._started = generation_pb2.Started()
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._open: dict[int, _OpenChoice] = {}
        self._done: dict[int, Choice] = {}

    def take(self, response: generation_pb2.GenerateResponse, now: float) -> Delta | None:
        """One more message, which came at ``now``; the piece of text in it, if there is one."""
        self.request_id = response.request_id
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
            case "prompt":
                self._prompt_logprobs = logprobs_from(response.prompt.logprobs)
                self.prompt_text = response.prompt.text if self._wants_echo else None
            case "delta":
                return self._take_delta(response.delta, now)
            case "finished":
                self._finish(response.finished, now)
        return None

    @property
    def ended(self) -> bool:
        """Whether every choice has."""
        return len(self._done) == self.num_choices

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises ``OutriderError`` before the end."""
        if not self.ended:
            raise OutriderError("the stream has not ended; iterate over it to its end first")
        choices = tuple(self._done[index] for index in sorted(self._done))
        return Completion(
            request_id=self.request_id,
            seed=self._started.seed,
            usage=replace(
                choices[0].usage, completion_tokens=sum(choice.usage.completion_tokens for choice in choices)
            ),
            choices=choices,
            prompt_text=self.prompt_text,
            prompt_logprobs=self._prompt_logprobs if self._wants_prompt_logprobs else None,
        )

    def _take_delta(self, message: generation_pb2.Delta, now: float) -> Delta:
        delta = Delta(message.text, tuple(message.token_ids), message.choice, logprobs_from(message.logprobs))
        choice = self._open.setdefault(delta.choice, _OpenChoice())
        choice.deltas.append(delta)
        if delta.token_ids:
            choice.arrivals.append(now)
        return delta

    def _finish(self, finished: generation_pb2.Finished, now: float) -> None:
        taken, finish = self._open.pop(finished.choice, _OpenChoice()), finished.finish
        logprobs = tuple(entry for delta in taken.deltas for entry in delta.logprobs)
        self._done[finished.choice] = Choice(
            index=finished.choice,
            text="".join(delta.text for delta in taken.deltas),
            token_ids=tuple(token for delta in taken.deltas for token in delta.token_ids),
            finish_reason=FINISH_REASONS.get(finish.reason, "abort"),
            matched_stop=finish.matched_stop or None,
            usage=Usage(finished.prompt_tokens, finished.completion_tokens, finish.cached_prompt_tokens),
            reproducible=finish.reproducible,
            speculation=_speculation_from(finish.speculation, self._started.verifier),
            timing=timing_from(self._begun, taken.arrivals, now),
            logprobs=logprobs if self._wants_logprobs else None,
        )


def logprobs_from(messages: Iterable[generation_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Log-probabilities as the client shows them."""
    return tuple(
        TokenLogprob(
            token_id=message.token_id,
            token=message.token,
            logprob=message.logprob if message.HasField("logprob") else None,
            rank=message.rank or None,
            top=tuple(TopLogprob(top.token_id, top.token, top.logprob) for top in message.top),
        )
        for message in messages
    )


def _speculation_from(stats: group_pb2.SpeculationStats, verifier: int) -> Speculation:
    """``verifier`` is that of the request, for a server that sends none with the counts."""
    return Speculation(
        verifier=Verifier(stats.verifier or verifier).label,
        drafter=stats.drafter,
        num_spec_steps=stats.num_spec_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        acceptance_histogram=tuple(stats.acceptance_histogram),
        target_calls=stats.target_calls,
        probability_bytes=stats.probability_bytes,
        num_forced_tokens=stats.num_forced_tokens,
        num_forced_accepted=stats.num_forced_accepted,
        grammar_ms=stats.grammar_ms,
    )

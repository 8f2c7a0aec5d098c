"""What a choice of a request has produced so far, for anyone who watches it, from any position."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from outrider.core.errors import InvalidRequest, OutriderError
from outrider.core.logprobs import TokenLogprobs
from outrider.router.requests import Committed, Finished, NewRequest
from outrider.v1 import group_pb2


@dataclass(frozen=True)
class Update:
    """Tokens that follow each other, and the end if they are the last ones.

    Attributes:
        position: position of ``tokens[0]`` in prompt + output; the length of the text where ``tokens`` is empty.
        logprobs: one for each of ``tokens``, where they are asked for.
        prompt_logprobs: with the first tokens of choice 0, where they are asked for: one for each token of the prompt
            but the first.
    """

    epoch: int
    generation: int
    position: int
    tokens: tuple[int, ...]
    finish: group_pb2.Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Transcript:
    """The output of one choice. Watchers that are slow get more at once; nothing is kept for each of them."""

    def __init__(self, request: NewRequest) -> None:
        self.request = request
        self.finished_at: float | None = None
        self._epoch = 0
        self._output: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._finish: group_pb2.Finish | None = None
        self._error: OutriderError | None = None
        self._changed = asyncio.Event()

    @property
    def generation(self) -> int:
        return self.request.generation

    def extend(self, epoch: int, committed: Committed) -> None:
        """Append committed tokens."""
        self._epoch = epoch
        self._output.extend(committed.tokens)
        self._logprobs.extend(committed.logprobs)
        self._prompt_logprobs = self._prompt_logprobs or committed.prompt_logprobs
        self._notify()

    def finish(self, finish: group_pb2.Finish, now: float) -> None:
        """The choice ended."""
        self._finish, self.finished_at = finish, now
        self._notify()

    def fail(self, error: OutriderError, now: float) -> None:
        """The choice cannot go on; watchers get ``error`` after the tokens."""
        self._error, self.finished_at = error, now
        self._notify()

    async def follow(self, from_position: int) -> AsyncIterator[Update]:
        """What was committed from a position on, then what follows; the last update has ``finish``.

        Raises ``InvalidRequest`` if the position is in the prompt or was not reached yet, and the error of a request
        that cannot go on.
        """
        start = len(self.request.prompt_tokens)
        if not start <= from_position <= start + len(self._output):
            limit = f"from {start} (the prompt's length) to {start + len(self._output)}"
            raise InvalidRequest("from_position", from_position, limit)
        sent = from_position - start
        while True:
            changed = self._changed
            update = self._since(sent)
            if update.tokens or update.finish is not None:
                yield update
                if update.finish is not None:
                    return
                sent += len(update.tokens)
                continue  # more may have come while the receiver was busy
            if self._error is not None:
                raise self._error
            await changed.wait()

    def _since(self, index: int) -> Update:
        """All output from an index on."""
        tokens = tuple(self._output[index:])
        return Update(
            epoch=self._epoch,
            generation=self.generation,
            position=len(self.request.prompt_tokens) + index,
            tokens=tokens,
            finish=self._finish,
            logprobs=tuple(self._logprobs[index:]),
            prompt_logprobs=self._prompt_logprobs if tokens and index == 0 else (),
        )

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def finish_to_wire(finished: Finished, stop_text: str = "") -> group_pb2.Finish:
    """How a choice ended, for clients; ``stop_text`` spells the stop token that ended it, if one did."""
    stats = finished.speculation
    return group_pb2.Finish(
        reason=int(finished.reason),  # type: ignore[arg-type]
        matched_stop=finished.matched_stop or stop_text,
        error_message=finished.error_message,
        reproducible=finished.reproducible,
        cached_prompt_tokens=finished.cached_prompt_tokens,
        speculation=group_pb2.SpeculationStats(
            verifier=int(stats.verifier),  # type: ignore[arg-type]
            drafter=stats.drafter,
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            acceptance_histogram=stats.acceptance_histogram,
            target_calls=stats.target_calls,
            probability_bytes=stats.probability_bytes,
            num_forced_tokens=stats.num_forced_tokens,
            num_forced_accepted=stats.num_forced_accepted,
            grammar_ms=stats.grammar_ms,
        ),
    )

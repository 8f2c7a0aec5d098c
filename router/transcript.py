"""What a request has produced so far, for anyone who watches it, from any position."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from outrider.core.errors import InvalidRequest, OutriderError
from outrider.router.requests import Finished, NewRequest
from outrider.v1 import group_pb2


@dataclass(frozen=True)
class Update:
    """Tokens that follow each other, and the end if they are the last ones.

    Attributes:
        position: position of ``tokens[0]`` in prompt + output; the length of the text where ``tokens`` is empty.
    """

    epoch: int
    generation: int
    position: int
    tokens: tuple[int, ...]
    finish: group_pb2.Finish | None = None


class Transcript:
    """The output of one request. Watchers that are slow get more at once; nothing is kept for each of them."""

    def __init__(self, request: NewRequest) -> None:
        self.request = request
        self.finished_at: float | None = None
        self._epoch = 0
        self._output: list[int] = []
        self._finish: group_pb2.Finish | None = None
        self._error: OutriderError | None = None
        self._changed = asyncio.Event()

    @property
    def generation(self) -> int:
        return self.request.generation

    def extend(self, epoch: int, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self._epoch = epoch
        self._output.extend(tokens)
        self._notify()

    def finish(self, finish: group_pb2.Finish, now: float) -> None:
        """The request ended."""
        self._finish, self.finished_at = finish, now
        self._notify()

    def fail(self, error: OutriderError, now: float) -> None:
        """The request cannot go on; watchers get ``error`` after the tokens."""
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
            tokens, finish = tuple(self._output[sent:]), self._finish
            if tokens or finish is not None:
                yield Update(self._epoch, self.generation, start + sent, tokens, finish)
                if finish is not None:
                    return
                sent += len(tokens)
                continue  # more may have come while the receiver was busy
            if self._error is not None:
                raise self._error
            await changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def finish_to_wire(finished: Finished, stop_text: str = "") -> group_pb2.Finish:
    """How a request ended, for clients; ``stop_text`` spells the stop token that ended it, if one did."""
    stats = finished.speculation
    return group_pb2.Finish(
        reason=int(finished.reason),  # type: ignore[arg-type]
        matched_stop=finished.matched_stop or stop_text,
        error_message=finished.error_message,
        reproducible=finished.reproducible,
        speculation=group_pb2.SpeculationStats(
            verifier=int(stats.verifier),  # type: ignore[arg-type]
            drafter=stats.drafter,
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            acceptance_histogram=stats.acceptance_histogram,
            target_calls=stats.target_calls,
            probability_bytes=stats.probability_bytes,
        ),
    )

"""What a frontend's requests waited for and how they ended: measured once a message, never once a token."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from outrider.core.errors_wire import code_name, code_names
from outrider.core.histogram import REQUEST_S, STEP_S, TOKENS, Histogram
from outrider.router.requests import FinishReason
from outrider.router.transcript import Update

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class RequestMeter:
    """Counts of one frontend since it began.

    Attributes:
        finished: choices that ended, by why: "stop", "length", or "abort", be it that their client went away.
        errors: requests that ended with an error, by its gRPC status.
        first_token: seconds from a request's arrival to its first tokens.
        gap: seconds between messages with tokens of one choice.
        per_token: the same shared among the tokens of the later message; each token counts.
        whole: seconds from arrival to the end of the last choice, where no error came between.
        prompt_tokens: of the requests that ``whole`` counts.
        generation_tokens: of all their choices.
    """

    def __init__(self) -> None:
        self.finished = dict.fromkeys(REASONS.values(), 0)
        self.errors = dict.fromkeys(code_names(), 0)
        self.first_token = Histogram(REQUEST_S)
        self.gap = Histogram(STEP_S)
        self.per_token = Histogram(STEP_S)
        self.whole = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)

    @contextlib.contextmanager
    def request(self) -> Iterator[RequestTimer]:
        """Measure the request that is answered within. What ends it passes through."""
        timer = RequestTimer(self)
        try:
            yield timer
        except (GeneratorExit, asyncio.CancelledError):
            if not timer.is_over:  # or the client has just not waited for the end of the stream
                self.finished["abort"] += max(1, timer.num_open)
                raise
            self._ended(timer)
            raise
        except Exception as error:
            self.errors[code_name(error)] += 1
            raise
        self._ended(timer)

    def _ended(self, timer: RequestTimer) -> None:
        self.whole.observe(time.monotonic() - timer.started)
        self.prompt_tokens.observe(timer.num_prompt_tokens)
        self.generation_tokens.observe(timer.num_tokens)


class RequestTimer:
    """One request.

    Attributes:
        started: when it came.
        num_prompt_tokens: of its prompt, once it is admitted.
        num_tokens: of its output so far.
        num_open: choices that have not ended.
    """

    def __init__(self, meter: RequestMeter) -> None:
        self.started = time.monotonic()
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.num_open = 0
        self._meter = meter
        self._latest: dict[int, float] = {}  # when tokens of a choice came last

    def admitted(self, num_prompt_tokens: int, num_choices: int) -> None:
        """It passed the checks."""
        self.num_prompt_tokens, self.num_open = num_prompt_tokens, num_choices

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return self.num_prompt_tokens > 0 and self.num_open == 0

    def took(self, choice: int, update: Update) -> None:
        """News of a choice came from its group."""
        count = len(update.tokens)
        if count:
            now = time.monotonic()
            latest = self._latest.get(choice)
            if latest is not None:
                self._meter.gap.observe(now - latest)
                self._meter.per_token.observe((now - latest) / count, count)
            elif not self._latest:
                self._meter.first_token.observe(now - self.started)
            self._latest[choice] = now
            self.num_tokens += count
        if update.finish is not None:
            self.num_open -= 1
            reason = REASONS.get(FinishReason(update.finish.reason))
            if reason is not None:  # of errors the exception tells
                self._meter.finished[reason] += 1

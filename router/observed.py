"""A request at the frontend, as the log and traces tell of it: its line in the log, and the span of the whole."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import TracebackType

from outrider.core.errors import OutriderError, for_log
from outrider.core.logs import bind
from outrider.core.tracing import Span, Tracing
from outrider.router.access import bind_request, current_call
from outrider.router.admission import Admitted
from outrider.v1 import generation_pb2, group_pb2

CANCELLED = "cancelled"


class Observed:
    """Use it as a context manager around the answer. What ends it passes through."""

    def __init__(self, request_id: str, tracing: Tracing | None) -> None:
        self._started = time.monotonic()
        self._call = current_call()
        self._tracing = tracing
        self._request_id = request_id
        self._span: Span | None = None
        self._num_open = 0  # choices; 0 before it is admitted
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._first_token_at: float | None = None
        self._reasons: list[str] = []
        self._speculation: group_pb2.SpeculationStats | None = None

    def __enter__(self) -> Observed:
        bind_request(self._request_id)
        if self._tracing is not None:
            headers = self._call.trace_headers if self._call is not None else {}
            attributes = {"gen_ai.request.id": self._request_id}
            self._span = self._tracing.begin("request", headers, attributes, is_server=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_over = bool(self._reasons) and self._num_open == 0
        if is_over or error is None:
            outcome = "+".join(sorted(set(self._reasons)))
        elif isinstance(error, GeneratorExit | asyncio.CancelledError):
            outcome = CANCELLED
        else:
            outcome = type(error).__name__
        if self._call is not None:
            self._call.outcome = self._call.outcome or outcome
        if self._span is not None:
            self._end_span(self._span, outcome, error if isinstance(error, Exception) else None)

    def admitted(self, admitted: Admitted) -> Admitted:
        """It passed the checks. Returns it with the span that its rounds belong to."""
        request = admitted.request
        self._num_open = request.num_choices
        self._num_prompt_tokens = len(request.prompt_tokens)
        if self._call is not None:
            self._call.prompt_tokens += self._num_prompt_tokens
        if self._span is None:
            return admitted
        self._span.set(
            {
                "gen_ai.request.n": request.num_choices,
                "gen_ai.request.max_tokens": request.max_tokens or 0,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.request.top_p": request.sampling.top_p,
                "outrider.verifier": request.sampling.verifier.label,
            }
        )
        return replace(admitted, request=replace(request, traceparent=self._span.traceparent))

    def note(self, response: generation_pb2.GenerateResponse) -> None:
        """A part of the answer is on its way to the client."""
        event = response.WhichOneof("event")
        if event == "delta":
            self._took(len(response.delta.token_ids))
        elif event == "finished":
            self._num_open -= 1
            finish = response.finished.finish
            name = group_pb2.FinishReason.Name(finish.reason)
            self._reasons.append(name.removeprefix("FINISH_REASON_").lower())
            self._speculation = finish.speculation
        elif event == "started":
            bind(epoch=response.header.epoch)
            if self._span is not None:
                self._span.set(
                    {"outrider.epoch": response.header.epoch, "outrider.group_id": response.started.group_id}
                )

    def _took(self, count: int) -> None:
        if not count:
            return
        self._num_tokens += count
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
        if self._call is not None:
            self._call.completion_tokens += count
            self._call.first_token_at = self._call.first_token_at or self._first_token_at

    def _end_span(self, span: Span, outcome: str, error: Exception | None) -> None:
        span.set(
            {
                "gen_ai.usage.prompt_tokens": self._num_prompt_tokens,
                "gen_ai.usage.completion_tokens": self._num_tokens,
                "gen_ai.latency.e2e": time.monotonic() - self._started,
                "outrider.finish_reason": outcome,
            }
        )
        if self._first_token_at is not None:
            span.set({"gen_ai.latency.time_to_first_token": self._first_token_at - self._started})
        if self._speculation is not None:
            span.set(
                {
                    "outrider.drafter": self._speculation.drafter,
                    "outrider.num_draft_tokens": self._speculation.num_draft_tokens,
                    "outrider.num_accepted_tokens": self._speculation.num_accepted_tokens,
                    "outrider.target_calls": self._speculation.target_calls,
                }
            )
        if error is not None:
            # Of what is no error of ours nobody knows what is in its text.
            span.fail(for_log(error) if isinstance(error, OutriderError) else type(error).__name__)
        span.end()

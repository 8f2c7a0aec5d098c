"""How peers are asked over HTTP, and how their server-sent events become arrivals of tokens."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.items import Item
from outrider.bench.load import Job
from outrider.bench.records import Arrival, Record

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Message:
    """What one event says: tokens so far, or new ones; tokens of the prompt; why it ended."""

    new_tokens: int = 0
    total_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Asking:
    """What holds for a request beside its item."""

    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = False


@dataclass(frozen=True)
class Protocol:
    """One way of asking.

    Attributes:
        health: path that answers 200 once the server is ready.
        path: where completions are asked for.
        body: of the request for an item.
        read: one event's JSON.
    """

    health: str
    path: str
    body: Callable[[Item, Asking], dict[str, Any]]
    read: Callable[[dict[str, Any]], Message]


def _llama_body(item: Item, asking: Asking) -> dict[str, Any]:
    return {
        "prompt": item.plain_prompt,
        "n_predict": item.max_tokens,
        "temperature": item.options.get("temperature", asking.temperature),
        "seed": asking.seed,
        "ignore_eos": asking.ignore_eos,
        "stream": True,
        "cache_prompt": False,
        "return_tokens": True,
    }


def _llama_read(event: dict[str, Any]) -> Message:
    if event.get("stop"):
        reason = "length" if event.get("stop_type") == "limit" else "stop"
        return Message(
            total_tokens=event.get("tokens_predicted"),
            prompt_tokens=event.get("tokens_evaluated"),
            finish_reason=reason,
        )
    return Message(new_tokens=len(event.get("tokens") or ()) or bool(event.get("content")))


def _completions_body(item: Item, asking: Asking) -> dict[str, Any]:
    return {
        "model": "peer",
        "prompt": item.plain_prompt,
        "max_tokens": item.max_tokens,
        "temperature": item.options.get("temperature", asking.temperature),
        "seed": asking.seed,
        "ignore_eos": asking.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def _completions_read(event: dict[str, Any]) -> Message:
    usage, choices = event.get("usage") or {}, event.get("choices") or [{}]
    return Message(
        new_tokens=int(bool(choices[0].get("text"))),
        total_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        finish_reason=choices[0].get("finish_reason"),
    )


LLAMA_CPP = Protocol("/health", "/completion", _llama_body, _llama_read)
COMPLETIONS = Protocol("/health", "/v1/completions", _completions_body, _completions_read)


@dataclass(frozen=True)
class ToPeer:
    """Sends to a peer on this machine (``load.Sender``)."""

    port: int
    protocol: Protocol
    asking: Asking
    threads: Executor

    async def __call__(self, job: Job) -> Record:
        return await asyncio.get_running_loop().run_in_executor(self.threads, self._ask, job)

    def _ask(self, job: Job) -> Record:
        begun = time.perf_counter()
        reading = Reading(self.protocol)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        error = None
        try:
            body = json.dumps(self.protocol.body(job.item, replace(self.asking, seed=job.seed)))
            connection.request("POST", self.protocol.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
            else:
                for line in response:
                    reading.take(line, time.perf_counter())
        except (OSError, http.client.HTTPException, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            connection.close()
        return replace(
            job.record,
            begun=begun,
            ended=time.perf_counter(),
            arrivals=tuple(reading.arrivals),
            prompt_tokens=reading.prompt_tokens,
            finish_reason=reading.finish_reason,
            error=error or (None if reading.arrivals else "an answer without tokens"),
        )


class Reading:
    """Lines of an answer, taken in as they come."""

    def __init__(self, protocol: Protocol) -> None:
        self.arrivals: list[Arrival] = []
        self.prompt_tokens = 0
        self.finish_reason = ""
        self._protocol = protocol
        self._tokens = 0

    def take(self, line: bytes, now: float) -> None:
        """Raises ``ValueError`` for what is no event, or one that tells of an error."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the server failed: {event['error']}")
        message = self._protocol.read(event)
        total = self._tokens + message.new_tokens if message.total_tokens is None else message.total_tokens
        if total > self._tokens:
            self.arrivals.append(Arrival(now, total - self._tokens))
            self._tokens = total
        self.prompt_tokens = message.prompt_tokens or self.prompt_tokens
        self.finish_reason = message.finish_reason or self.finish_reason

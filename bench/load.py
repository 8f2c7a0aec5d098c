"""Sending requests: so many at once, or at the times of a schedule, whatever the server makes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from outrider.bench.items import Item
from outrider.bench.numbers import poisson_arrivals
from outrider.bench.records import Arrival, Record
from outrider.client import AsyncClient, InvalidRequest, OutriderError, Prompt


@dataclass(frozen=True)
class Job:
    """A request that is to be sent; ``record`` has what is known of it before."""

    item: Item
    record: Record
    seed: int


class Sender(Protocol):
    """Sends one request and tells what came of it; what goes wrong is in the record, never raised."""

    def __call__(self, job: Job) -> Awaitable[Record]: ...


@dataclass(frozen=True)
class ToServer:
    """Sends to a running Outrider.

    Attributes:
        options: of every request; an item's own come first.
        as_chat: whether messages go through the model's chat template.
    """

    client: AsyncClient
    options: dict[str, Any]
    as_chat: bool

    async def __call__(self, job: Job) -> Record:
        item = job.item
        is_chat = self.as_chat and bool(item.messages)
        prompt: Prompt = list(item.messages) if is_chat else item.plain_prompt
        options = {"max_tokens": item.max_tokens, "seed": job.seed, **self.options, **item.options}
        if item.has_grammar:  # its texts end where the grammar does
            options.pop("ignore_eos", None)
        begun = time.perf_counter()
        arrivals: list[Arrival] = []
        record = replace(job.record, begun=begun)
        try:
            async with self.client.stream(prompt, **options) as stream:
                async for delta in stream.events():
                    if delta.token_ids:
                        arrivals.append(Arrival(time.perf_counter(), len(delta.token_ids)))
            answer = stream.completion
        except OutriderError as error:
            line = f"{type(error).__name__}: {error}"
            refused = isinstance(error, InvalidRequest)
            return replace(record, ended=time.perf_counter(), arrivals=tuple(arrivals), error=line, refused=refused)
        return replace(
            record,
            ended=time.perf_counter(),
            arrivals=tuple(arrivals),
            prompt_tokens=answer.usage.prompt_tokens,
            finish_reason=answer.finish_reason,
            speculation=answer.speculation,
        )


Done = Callable[[Record], None]


async def closed_loop(jobs: Sequence[Job], send: Sender, concurrency: int, done: Done) -> list[Record]:
    """``concurrency`` clients, each of which sends its next request when its last one has ended."""
    waiting = iter(jobs)
    records: list[Record] = []

    async def client() -> None:
        for job in waiting:
            now = time.perf_counter()
            record = await send(replace(job, record=replace(job.record, due=now, begun=now)))
            records.append(record)
            done(record)

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(jobs))):
            clients.create_task(client())
    return records


async def open_loop(jobs: Sequence[Job], send: Sender, rate: float, seed: int, done: Done) -> list[Record]:
    """Requests arrive at the times of a Poisson process, however many are running."""
    start = time.perf_counter()
    records: list[Record] = []

    async def request(job: Job, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        record = await send(replace(job, record=replace(job.record, due=due, begun=due)))
        records.append(record)
        done(record)

    async with asyncio.TaskGroup() as requests:
        for job, at in zip(jobs, poisson_arrivals(len(jobs), rate, seed), strict=True):
            requests.create_task(request(job, start + at))
    return records

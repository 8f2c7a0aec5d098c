"""One benchmark: all arms take turns on the same requests, workload by workload.

A workload's requests are dealt into blocks. Each arm runs the first block, then each runs the second, and so on, and
who begins changes from block to block: a machine that grows slower or faster does so for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.items import Item, Workload, tagged
from outrider.bench.load import Job, Sender, ToServer, closed_loop, open_loop
from outrider.bench.records import Record
from outrider.bench.watch import CacheUse, Energy, watched
from outrider.bench.workloads import chosen
from outrider.client import AsyncClient, Endpoint, GenerationFailed, InvalidRequest, OutriderError

PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass(frozen=True)
class BenchSettings:
    """What is run.

    Attributes:
        requests: of each workload and arm.
        rate: requests a second that arrive on average; None: ``concurrency`` requests at once.
        blocks: turns of each arm in each workload.
        num_speculative_tokens: of the speculative arm; None: the server's setting.
        options: of every request, unless its item says otherwise.
        deadline_s: of the whole run.
        plain_prompts: send messages as text, as where other servers are to get the same.
        tag_prompts: begin each prompt with a tag of its arm and number, so that the arm that comes second finds none of
            them in the server's prefix cache.
    """

    workloads: tuple[Workload, ...]
    requests: int = 16
    rate: float | None = None
    concurrency: int = 1
    blocks: int = 4
    max_tokens: int | None = None
    num_speculative_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    deadline_s: float = 3600.0
    plain_prompts: bool = False
    tag_prompts: bool = True


@dataclass(frozen=True)
class Arm:
    """One of those that take turns.

    Attributes:
        turn: held while it is its turn.
    """

    name: str
    send: Sender
    turn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@dataclass(frozen=True)
class Block:
    """One turn of an arm."""

    workload: str
    arm: str
    number: int
    begun: float
    wall_s: float
    tokens: int
    joules: float | None
    cache: CacheUse


@dataclass(frozen=True)
class BenchRun:
    """Everything that was seen.

    Attributes:
        origin: when it began, in the clock of the records.
        complete: whether every request was sent before the deadline.
    """

    settings: BenchSettings
    arms: tuple[str, ...]
    records: tuple[Record, ...]
    blocks: tuple[Block, ...]
    origin: float
    complete: bool
    status: dict[str, Any]


Tell = Callable[[str, int, int], None]


async def run(address: str | Endpoint, settings: BenchSettings, tell: Tell, peers: Sequence[Arm] = ()) -> BenchRun:
    """Run it. ``tell`` is called with what runs, requests that have ended, and all of them.

    Raises ``Unavailable`` and the like if the server does not answer, and ``GenerationFailed`` if no request of an arm
    went well.
    """
    async with AsyncClient(address, timeout=settings.deadline_s) as client:
        status = await client.status(timeout=10.0)
        as_chat = not settings.plain_prompts and await _has_chat(client, settings.workloads)
        arms = [
            Arm(PLAIN, ToServer(client, {**settings.options, "num_speculative_tokens": 0}, as_chat)),
            Arm(SPECULATIVE, ToServer(client, _speculative(settings), as_chat)),
            *peers,
        ]
        return await _run_arms(client, settings, arms, status, tell)


async def _run_arms(
    client: AsyncClient, settings: BenchSettings, arms: Sequence[Arm], status: dict[str, Any], tell: Tell
) -> BenchRun:
    records: list[Record] = []
    blocks: list[Block] = []
    total = len(settings.workloads) * settings.requests * len(arms)
    origin = time.perf_counter()
    complete = True
    try:
        async with asyncio.timeout(settings.deadline_s):
            await _warm_up(arms, settings.workloads[0])
            for workload in settings.workloads:
                items = chosen(workload, settings.requests, settings.seed, settings.max_tokens)
                for number, block in enumerate(dealt(items, settings.blocks)):
                    for arm in turns(arms, number):

                        def done(record: Record, words: str = f"{workload.name}, {arm.name}") -> None:
                            records.append(record)
                            tell(words, len(records), total)

                        blocks.append(await _run_block(client, settings, workload.name, number, arm, block, done))
    except TimeoutError:
        complete = False
    _check(records, arms)
    return BenchRun(settings, tuple(arm.name for arm in arms), tuple(records), tuple(blocks), origin, complete, status)


async def _run_block(
    client: AsyncClient,
    settings: BenchSettings,
    workload: str,
    number: int,
    arm: Arm,
    items: Sequence[tuple[int, Item]],
    done: Callable[[Record], None],
) -> Block:
    jobs = []
    for index, item in items:
        sent = tagged(item, tag(settings.seed, workload, arm.name, index)) if settings.tag_prompts else item
        record = Record(workload, item.name, index, arm.name, number, 0.0, 0.0, 0.0)
        jobs.append(Job(sent, record, settings.seed + index))
    energy, cache = Energy.find(), CacheUse()
    before = energy.read() if energy is not None else ()
    is_ours = arm.name in (PLAIN, SPECULATIVE)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(arm.turn())
        if is_ours:
            await stack.enter_async_context(watched(client, cache))
        begun = time.perf_counter()
        if settings.rate is None:
            records = await closed_loop(jobs, arm.send, settings.concurrency, done)
        else:
            records = await open_loop(jobs, arm.send, settings.rate, settings.seed + number, done)
        wall_s = time.perf_counter() - begun
    joules = energy.joules(before, energy.read()) if energy is not None else None
    return Block(workload, arm.name, number, begun, wall_s, sum(r.tokens for r in records), joules, cache)


def tag(*parts: object) -> str:
    """Eight digits that depend on all parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()


def dealt(items: Sequence[Item], blocks: int) -> list[list[tuple[int, Item]]]:
    """The items with their numbers, in that many blocks of about one size; fewer where there are fewer items."""
    numbered = list(enumerate(items))
    count = min(blocks, len(items))
    return [numbered[len(items) * part // count : len(items) * (part + 1) // count] for part in range(count)]


def turns(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The order of the arms in a block: each begins in its turn."""
    start = number % len(arms)
    return [*arms[start:], *arms[:start]]


def _speculative(settings: BenchSettings) -> dict[str, Any]:
    k = settings.num_speculative_tokens
    return dict(settings.options) if k is None else {**settings.options, "num_speculative_tokens": k}


async def _warm_up(arms: Sequence[Arm], workload: Workload) -> None:
    """One short request for each arm, which is not counted. What is wrong with it shows again in those that are."""
    item = min(workload.items, key=lambda item: len(item.plain_prompt))
    short = Item("warm-up", item.prompt, item.messages, 8)
    for arm in arms:
        with arm.turn():
            await arm.send(Job(short, Record(workload.name, "warm-up", 0, arm.name, 0, 0.0, 0.0, 0.0), 0))


async def _has_chat(client: AsyncClient, workloads: Sequence[Workload]) -> bool:
    """Whether the model has a chat template. Asked only where there are messages to send."""
    messages = next((item.messages for workload in workloads for item in workload.items if item.messages), None)
    if messages is None:
        return False
    try:
        await client.generate([{"role": "user", "content": "."}], max_tokens=1, temperature=0, timeout=60.0)
    except InvalidRequest as error:
        if error.field.startswith("chat"):
            return False
        raise
    return True


def _check(records: Sequence[Record], arms: Sequence[Arm]) -> None:
    for arm in arms:
        own = [record for record in records if record.arm == arm.name]
        errors = [record.error for record in own if record.error is not None]
        if own and len(errors) == len(own):
            raise GenerationFailed(f"no request went well ({arm.name}); the first: {errors[0]}")
    if not records:
        raise OutriderError("the deadline passed before a request had ended")

"""What running streams feel of a long prompt that enters beside them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from outrider.bench.measures.arms import Arm, arms_for, checked, group_facts
from outrider.bench.measures.command import Tell
from outrider.bench.measures.gaps import Gaps, Stream, Window, p99_ratio, split, spread
from outrider.bench.measures.texts import Texts, texts_for
from outrider.bench.records import Arrival
from outrider.client import AsyncClient

STREAM_PROMPT = 64  # tokens


class Streams:
    """So many requests that run all the time: one that ends, at the end of the context, is followed by another."""

    def __init__(self, client: AsyncClient, texts: Texts, arm: Arm, count: int) -> None:
        self.seen: list[Stream] = []
        self._client, self._texts, self._arm = client, texts, arm
        self._messages = [0] * count
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Within it they run."""
        tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._messages))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def more_messages(self, count: int) -> None:
        """Until each has brought so many more. Raises what a stream raised."""
        wanted = [messages + count for messages in self._messages]
        while any(messages < least for messages, least in zip(self._messages, wanted, strict=True)):
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    async def _run(self, index: int) -> None:
        number = 0
        try:
            while True:
                prompt = self._texts.text(STREAM_PROMPT, "stream", self._arm.name, index, number)
                await self._stream(index, prompt)
                number += 1
        except Exception as error:  # noqa: BLE001 - whoever waits for messages raises it
            self._error = error
            self._changed.set()

    async def _stream(self, index: int, prompt: str) -> None:
        seen = Stream(time.perf_counter())
        self.seen.append(seen)
        async with self._client.stream(prompt, ignore_eos=True, **self._arm.options) as stream:
            async for delta in stream.events():
                if delta.token_ids:
                    seen.arrivals.append(Arrival(time.perf_counter(), len(delta.token_ids)))
                    self._messages[index] += 1
                    self._changed.set()
        checked(stream.completion)


async def measure_entering(
    client: AsyncClient,
    tell: Tell,
    *,
    streams: int,
    prompt_tokens: int,
    rounds: int,
    quiet_messages: int,
    k: int | None,
    seed: int,
) -> dict[str, Any]:
    """In each round the streams run alone for ``quiet_messages`` messages each, then a prompt enters.

    Raises what the client raises.
    """
    texts = await texts_for(client, seed)
    arms = {}
    for arm in await arms_for(client, k):
        load = Streams(client, texts, arm, streams)
        windows: list[Window] = []
        lengths: list[int] = []
        async with load.running():
            await load.more_messages(3)  # the prompts of all of them are in
            for number in range(1, rounds + 1):
                await load.more_messages(quiet_messages)
                begun = time.perf_counter()
                prompt = texts.text(prompt_tokens, "entering", arm.name, number)
                answer = checked(await client.generate(prompt, max_tokens=1, ignore_eos=True, **arm.options))
                windows.append(Window(begun, time.perf_counter()))
                lengths.append(answer.usage.prompt_tokens)
                tell(f"entering, {arm.name}, round {number} of {rounds}: {windows[-1].ended - begun:.2f} s")
            await load.more_messages(2)  # a gap that began within the last window has its end
        arms[arm.name] = {"prompt_tokens": lengths, **_figures(load.seen, windows)}
    return {"measure": "entering", "streams": streams, "server": await group_facts(client), "arms": arms}


def _figures(streams: list[Stream], windows: list[Window]) -> dict[str, Any]:
    quiet, within = split(streams, windows)
    all_within = Gaps()
    for gaps in within:
        all_within.extend(gaps)
    rounds = {
        "message_gap": [p99_ratio(quiet.message, gaps.message) for gaps in within],
        "token_gap": [p99_ratio(quiet.token, gaps.token) for gaps in within],
    }
    return {
        "entering_s": spread([window.ended - window.begun for window in windows]),
        "before": quiet.to_dict(),
        "during": all_within.to_dict(),
        "p99_during_over_before": {
            "message_gap": p99_ratio(quiet.message, all_within.message),
            "token_gap": p99_ratio(quiet.token, all_within.token),
        },
        "p99_ratio_by_round": {
            name: spread([ratio for ratio in ratios if ratio is not None]) for name, ratios in rounds.items()
        },
    }

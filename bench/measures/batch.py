"""Many streams against one: tokens a second in all, plain and with speculation."""

from __future__ import annotations

import time
from typing import Any

from outrider.bench.items import tagged
from outrider.bench.load import Job, ToServer, closed_loop
from outrider.bench.measures.arms import Arm, arms_for, group_facts
from outrider.bench.measures.command import Tell
from outrider.bench.measures.gaps import spread
from outrider.bench.numbers import Pair, speed_ratio
from outrider.bench.records import Record, sound
from outrider.bench.run import tag
from outrider.bench.workloads import chosen, load
from outrider.client import AsyncClient, GenerationFailed


async def measure_batch(
    client: AsyncClient,
    tell: Tell,
    *,
    workload: str,
    streams: int,
    max_tokens: int,
    blocks: int,
    k: int | None,
    seed: int,
) -> dict[str, Any]:
    """One stream plain, ``streams`` plain and ``streams`` with speculation take turns on the same requests.

    A block is ``streams`` requests of exactly ``max_tokens`` tokens; one stream sends a quarter of them.
    Raises ``GenerationFailed`` where a request fails.
    """
    items = chosen(load(workload), streams * blocks, seed, max_tokens)
    arms = await arms_for(client, k)
    kinds = [("one stream, plain", arms[0], 1), *((f"{streams} streams, {arm.name}", arm, streams) for arm in arms)]
    seen: dict[str, list[tuple[int, float]]] = {name: [] for name, _, _ in kinds}
    await _block(client, arms[-1], items[:1], 1, ("warm-up",))
    for number in range(blocks):
        block = items[number * streams : (number + 1) * streams]
        start = number % len(kinds)
        for name, arm, concurrency in (*kinds[start:], *kinds[:start]):
            sent = block if concurrency > 1 else block[: max(1, streams // 4)]
            tokens, seconds = await _block(client, arm, sent, concurrency, (seed, name, number))
            seen[name].append((tokens, seconds))
            tell(f"batch, block {number + 1} of {blocks}, {name}: {tokens / seconds:.2f} tokens/s")
    names = [name for name, _, _ in kinds]
    return {
        "measure": "batch",
        "workload": workload,
        "streams": streams,
        "max_tokens": max_tokens,
        "server": await group_facts(client),
        "tokens_per_s": {name: spread([tokens / seconds for tokens, seconds in seen[name]]) for name in names},
        "over_one_stream": {name: _ratio(seen[names[0]], seen[name], seed) for name in names[1:]},
        "speculation_over_plain": _ratio(seen[names[1]], seen[names[2]], seed) if len(names) > 2 else None,
    }


async def _block(
    client: AsyncClient, arm: Arm, items: Any, concurrency: int, key: tuple[object, ...]
) -> tuple[int, float]:
    """Tokens and seconds of a block. Each prompt begins with a tag, so that no arm finds another's in the cache."""
    jobs = [
        Job(tagged(item, tag(*key, index)), Record("batch", item.name, index, arm.name, 0, 0.0, 0.0, 0.0), 0)
        for index, item in enumerate(items)
    ]
    send = ToServer(client, {**arm.options, "ignore_eos": True}, as_chat=False)
    begun = time.perf_counter()
    records = await closed_loop(jobs, send, concurrency, lambda record: None)
    seconds = time.perf_counter() - begun
    failed = next((record.error for record in records if record.error is not None), None)
    if failed is not None:
        raise GenerationFailed(failed)
    return sum(record.tokens for record in sound(records)), seconds


def _ratio(base: list[tuple[int, float]], other: list[tuple[int, float]], seed: int) -> dict[str, Any] | None:
    """Over all blocks, with the spread of single blocks."""
    pairs = [Pair(*one, *two) for one, two in zip(base, other, strict=True)]
    whole = speed_ratio(pairs, seed=seed, resamples=1)
    if whole is None:
        return None
    each = [ratio.value for pair in pairs if (ratio := speed_ratio([pair], seed=seed)) is not None]
    return {"ratio": round(whole.value, 4), "by_block": spread(each)}

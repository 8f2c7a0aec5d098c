"""More text at once than the cache of the group holds: nothing may be lost or changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from outrider.bench.measures.arms import Arm, arms_for, group_facts
from outrider.bench.measures.command import Tell
from outrider.bench.measures.compare import first_difference
from outrider.bench.measures.texts import texts_for
from outrider.bench.watch import CacheUse, watched
from outrider.client import AsyncClient, Completion, ConfigError, OutriderError

MOST_REQUESTS = 256  # a router's queue, unless its settings say otherwise


def requests_needed(num_blocks: int, block_size: int, positions: int, factor: float) -> int:
    """So many requests of ``positions`` tokens each need ``factor`` times the blocks. Raises ``ConfigError``."""
    each = -(-positions // block_size)
    if each > num_blocks:
        raise ConfigError(f"one request takes {each} blocks, but the group has {num_blocks}: ask for shorter ones")
    count = -int(-(factor * num_blocks) // each)
    if count > MOST_REQUESTS:
        raise ConfigError(
            f"{factor:g} times {num_blocks} blocks are {count} requests, more than {MOST_REQUESTS}: ask for longer "
            "ones, or start the cluster with a smaller target.num_kv_blocks"
        )
    return count


async def measure_oversubscribed(
    client: AsyncClient,
    tell: Tell,
    *,
    factor: float,
    prompt_tokens: int,
    max_tokens: int,
    block_size: int,
    k: int | None,
    seed: int,
) -> dict[str, Any]:
    """All requests at once, then each of them alone. Raises what the client raises where none of them counts."""
    before = await client.status(timeout=30.0)
    num_blocks = sum(group["kv_blocks_total"] for group in before["groups"])
    if not num_blocks:
        raise ConfigError("the cluster has no target group that is ready; see `outrider status`")
    count = requests_needed(num_blocks, block_size, prompt_tokens + max_tokens, factor)
    texts = await texts_for(client, seed)
    prompts = [texts.text(prompt_tokens, "oversubscribed", number) for number in range(count)]
    arm = (await arms_for(client, k))[-1]
    use = CacheUse()
    begun = time.perf_counter()
    async with watched(client, use):
        together = await _together(client, tell, arm, prompts, max_tokens)
    together_s = time.perf_counter() - begun
    after = await client.status(timeout=30.0)
    begun = time.perf_counter()
    alone = []
    for number, prompt in enumerate(prompts, 1):
        alone.append(await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, **arm.options))
        tell(f"oversubscribed: alone {number} of {count}")
    alone_s = time.perf_counter() - begun
    whole = [answer for answer in together if isinstance(answer, Completion)]
    taken = sum(-(-(each.usage.prompt_tokens + each.usage.completion_tokens) // block_size) for each in whole)
    return {
        "measure": "oversubscribed",
        "arm": arm.name,
        "server": await group_facts(client),
        "requests": count,
        "blocks_wanted_over_blocks": round(taken / num_blocks, 3),
        "lost": [str(answer) for answer in together if not isinstance(answer, Completion)],
        "ended_early": sum(each.finish_reason != "length" for each in (*whole, *alone)),
        **_texts(together, alone),
        "preemptions": _preemptions(before, after),
        "kv_occupancy": _share(use.occupancy),
        "most_running": max(use.running, default=None),
        "most_queued": max(use.queued, default=None),
        "together_s": round(together_s, 3),
        "alone_s": round(alone_s, 3),
        "together_tokens_per_s": round(sum(each.usage.completion_tokens for each in whole) / together_s, 3),
        "alone_tokens_per_s": round(sum(each.usage.completion_tokens for each in alone) / alone_s, 3),
    }


def is_sound(facts: dict[str, Any]) -> bool:
    """Whether every request ended as it should, with the text that it has alone."""
    return not facts["lost"] and not facts["ended_early"] and facts["equal_texts"] == facts["requests"]


async def _together(
    client: AsyncClient, tell: Tell, arm: Arm, prompts: Sequence[str], max_tokens: int
) -> list[Completion | OutriderError]:
    done = 0

    async def one(prompt: str) -> Completion | OutriderError:
        nonlocal done
        try:
            return await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, **arm.options)
        except OutriderError as error:
            return error
        finally:
            done += 1
            tell(f"oversubscribed: together {done} of {len(prompts)}")

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


def _texts(together: Sequence[Completion | OutriderError], alone: Sequence[Completion]) -> dict[str, Any]:
    differences = []
    for index, (one, other) in enumerate(zip(together, alone, strict=True)):
        if isinstance(one, Completion) and (found := first_difference(other.token_ids, one.token_ids)) is not None:
            differences.append({"request": index, **found.to_dict()})
    finished = sum(isinstance(answer, Completion) for answer in together)
    return {"equal_texts": finished - len(differences), "differences": differences}


def _preemptions(before: dict[str, Any], after: dict[str, Any]) -> int | None:
    """None where the status does not count them."""
    counts = [[group.get("preemptions") for group in status["groups"]] for status in (before, after)]
    if any(value is None for values in counts for value in values):
        return None
    return int(sum(counts[1]) - sum(counts[0]))


def _share(shares: Sequence[float]) -> dict[str, float] | None:
    return {"mean": round(sum(shares) / len(shares), 4), "max": round(max(shares), 4)} if shares else None

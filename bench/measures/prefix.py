"""What a prefix that the server has computed before saves of the time to the first token."""

from __future__ import annotations

from typing import Any

from outrider.bench.measures.arms import Arm, arms_for, checked, group_facts
from outrider.bench.measures.command import Tell
from outrider.bench.measures.gaps import spread
from outrider.bench.measures.texts import Texts, texts_for
from outrider.client import AsyncClient, GenerationFailed


async def measure_prefix(
    client: AsyncClient, tell: Tell, *, prefix_tokens: int, more_tokens: int, pairs: int, k: int | None, seed: int
) -> dict[str, Any]:
    """Pairs of requests: one of a text that was never seen, then one that goes on after the same text.

    A pair before the first warms up. Each arm has texts of its own. Raises what the client raises.
    """
    texts = await texts_for(client, seed)
    arms: dict[str, Any] = {}
    for arm in await arms_for(client, k):
        seen = []
        for number in range(pairs + 1):
            pair = await _pair(client, texts, arm, number, prefix_tokens, more_tokens)
            tell(f"prefix, {arm.name}, pair {number} of {pairs}: {pair['first_ms']} ms, then {pair['second_ms']} ms")
            if number:
                seen.append(pair)
        arms[arm.name] = {
            "first_ttft_ms": spread([pair["first_ms"] for pair in seen]),
            "second_ttft_ms": spread([pair["second_ms"] for pair in seen]),
            "second_over_first": spread([pair["ratio"] for pair in seen]),
            "pairs": seen,
        }
    return {"measure": "prefix", "server": await group_facts(client), "arms": arms}


async def _pair(
    client: AsyncClient, texts: Texts, arm: Arm, number: int, prefix_tokens: int, more_tokens: int
) -> dict[str, Any]:
    shared = texts.text(prefix_tokens, "prefix", arm.name, number)
    first_ms, first_tokens = await _first_token(client, arm, shared)
    second_ms, second_tokens = await _first_token(client, arm, shared + texts.text(more_tokens, "more", number))
    return {
        "first_prompt_tokens": first_tokens,
        "second_prompt_tokens": second_tokens,
        "first_ms": round(first_ms, 3),
        "second_ms": round(second_ms, 3),
        "ratio": round(second_ms / first_ms, 4),
    }


async def _first_token(client: AsyncClient, arm: Arm, prompt: str) -> tuple[float, int]:
    """Milliseconds to it, and the prompt's tokens."""
    answer = checked(await client.generate(prompt, max_tokens=1, ignore_eos=True, **arm.options))
    if not answer.timing.ttft_ms:
        raise GenerationFailed("a request ended without a token")
    return answer.timing.ttft_ms, answer.usage.prompt_tokens

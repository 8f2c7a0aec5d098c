"""Requests that tests send, and what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.client import AsyncClient, Completion

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Case:
    """One request. ``verifier`` holds where the temperature is not 0; ``num_speculative_tokens`` None: the server's."""

    prompt: tuple[int, ...] | str
    temperature: float = 1.0
    seed: int = 0
    max_tokens: int = 48
    top_k: int = 0
    top_p: float = 1.0
    verifier: str = "coupled"
    num_speculative_tokens: int | None = None

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        if self.temperature:
            options |= {"verifier": self.verifier}
        if self.top_k:
            options |= {"top_k": self.top_k}
        if self.top_p < 1.0:
            options |= {"top_p": self.top_p}
        return {name: value for name, value in options.items() if value is not None}

    def with_k(self, k: int | None) -> Case:
        return replace(self, num_speculative_tokens=k)


def run_all(address: str, cases: Sequence[Case], *, on_token: Callable[[int], None] | None = None) -> list[Completion]:
    """Run the requests at once. ``on_token`` is called with the number of tokens that came, over all of them."""
    return asyncio.run(_run_all(address, cases, on_token))


def run_in_turn(address: str, cases: Sequence[Case]) -> list[Completion]:
    """Run one request after the other."""
    return [run_all(address, [case])[0] for case in cases]


async def _run_all(address: str, cases: Sequence[Case], on_token: Callable[[int], None] | None) -> list[Completion]:
    total = 0

    async def one(client: AsyncClient, case: Case) -> Completion:
        nonlocal total
        prompt = case.prompt if isinstance(case.prompt, str) else list(case.prompt)
        async with client.stream(prompt, **case.options()) as stream:
            async for delta in stream.events():
                total += len(delta.token_ids)
                if on_token is not None:
                    on_token(total)
        return stream.completion

    async with AsyncClient(address, timeout=DEADLINE_S) as client:
        return await asyncio.gather(*(one(client, case) for case in cases))

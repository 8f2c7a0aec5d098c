"""Prompts of about so many tokens, cut from those of the workload ``code``."""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.bench.run import tag
from outrider.bench.workloads import load
from outrider.client import AsyncClient

SAMPLES, SAMPLE = 8, 600  # texts, and characters of each, that tell how long tokens are


@dataclass(frozen=True)
class Texts:
    """Attributes:
    pool: what texts are cut from.
    characters_per_token: of that, by the server's tokenizer.
    seed: another one gives other texts, which a server that has seen these has not in its cache.
    """

    pool: str
    characters_per_token: float
    seed: int

    def text(self, tokens: int, *key: object) -> str:
        """About ``tokens`` tokens, the same for the same key; no two keys share a beginning."""
        name = tag(self.seed, *key)
        wanted = max(1, round(tokens * self.characters_per_token) - len(name) - 4)
        start = random.Random(name).randrange(len(self.pool))
        repeated = self.pool[start:] + self.pool * (wanted // len(self.pool) + 1)
        return f"# {name}\n{repeated[:wanted].rstrip()}\n"


async def texts_for(client: AsyncClient, seed: int) -> Texts:
    """Asks the server for the lengths of some texts. Raises what the client raises."""
    pool = "\n".join(item.plain_prompt for item in load("code").items)
    samples = [pool[len(pool) * part // SAMPLES :][:SAMPLE] for part in range(SAMPLES)]
    tokens = 0
    for sample in samples:
        answer = await client.generate(sample, max_tokens=1, temperature=0, num_speculative_tokens=0)
        tokens += answer.usage.prompt_tokens
    return Texts(pool, sum(len(sample) for sample in samples) / tokens, seed)

"""Whether greedy texts are the same, token by token, with and without speculation, alone and among others."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.measures.arms import checked, group_facts
from outrider.bench.measures.command import Tell
from outrider.bench.workloads import load
from outrider.client import AsyncClient, Completion, ConfigError

REFERENCE = "plain-alone"
WAYS = (REFERENCE, "plain-among", "speculative-alone", "speculative-among")


@dataclass(frozen=True)
class Difference:
    """The first place where two texts differ; None for the token of the one that has ended there."""

    position: int
    reference: int | None
    found: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(reference: Sequence[int], found: Sequence[int]) -> Difference | None:
    """None where they are the same."""
    for position, (one, other) in enumerate(itertools.zip_longest(reference, found)):
        if one != other:
            return Difference(position, one, other)
    return None


def prompts_of(workload: str, count: int) -> list[str]:
    """The prompts of a workload, in order; once they are used up, again with another end."""
    items = [item.plain_prompt for item in load(workload).items]
    prompts = []
    for number in range(count):
        turn, place = divmod(number, len(items))
        prompts.append(items[place] if turn == 0 else f"{items[place]}    # Way {turn + 1}.\n")
    return prompts


@dataclass
class Seen:
    """The texts of one way, by the number of their prompts; of some there may be two."""

    texts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    drafters: set[str] = field(default_factory=set)
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, number: int, answer: Completion) -> None:
        self.texts.append((number, tuple(answer.token_ids)))
        self.drafters |= {answer.speculation.drafter} - {""}
        self.proposed += answer.speculation.num_draft_tokens
        self.accepted += answer.speculation.num_accepted_tokens

    def to_dict(self, reference: Mapping[int, Sequence[int]]) -> dict[str, Any]:
        found = [(number, first_difference(reference[number], tokens)) for number, tokens in self.texts]
        differences = [{"prompt": number, **each.to_dict()} for number, each in found if each is not None]
        return {
            "texts": len(self.texts),
            "equal": len(self.texts) - len(differences),
            "differences": differences,
            "tokens": sum(len(tokens) for _, tokens in self.texts),
            "drafters": sorted(self.drafters),
            "proposed": self.proposed,
            "accepted": self.accepted,
            "seconds": round(self.seconds, 2),
        }


async def compare_texts(
    client: AsyncClient,
    tell: Tell,
    *,
    workload: str,
    count: int,
    ways: Sequence[str],
    k: int,
    others: int,
    max_tokens: int,
    save: Path | None,
    against: Path | None,
) -> dict[str, Any]:
    """Each prompt in each way; the first way (or the file ``against``) is what the others are compared with.

    Raises what the client raises, and ``ConfigError`` for files that cannot be used.
    """
    prompts = prompts_of(workload, count)
    known = _read(against, prompts, max_tokens) if against is not None else None
    ways = [way for way in WAYS if way in ways]
    if known is None and len(ways) < 2:
        raise ConfigError("at least two ways are compared, or one with --against")
    seen: dict[str, Seen] = {}
    for way in ways:
        options = {"temperature": 0, "max_tokens": max_tokens}
        options["num_speculative_tokens"] = k if way.startswith("speculative") else 0
        seen[way] = await _texts(client, tell, way, prompts, options, others + 1 if way.endswith("among") else 1)
    reference = known if known is not None else dict(reversed(seen[ways[0]].texts))
    if save is not None:
        _write(save, prompts, max_tokens, reference)
    results = {way: each.to_dict(reference) for way, each in seen.items()}
    return {
        "verdict": verdict(results),
        "compared_with": str(against) if against is not None else ways[0],
        "workload": workload,
        "prompts": count,
        "max_tokens": max_tokens,
        "num_speculative_tokens": k,
        "others": others,
        "server": await group_facts(client),
        "ways": results,
    }


def verdict(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Passed, failed, or unknown where speculation had nothing to get wrong: no proposal, or none that was refused."""
    if any(result["differences"] for result in results.values()):
        return "failed"
    speculative = [result for way, result in results.items() if way.startswith("speculative")]
    if any(not 0 < result["accepted"] < result["proposed"] for result in speculative):
        return "unknown"
    return "passed" if all(result["tokens"] for result in results.values()) else "unknown"


async def _texts(
    client: AsyncClient, tell: Tell, way: str, prompts: Sequence[str], options: dict[str, Any], at_once: int
) -> Seen:
    """Every prompt, ``at_once`` of them at any time: the first ones are sent again behind the last."""
    seen, begun = Seen(), time.perf_counter()
    total = len(prompts) + at_once - 1
    waiting: Iterator[int] = iter([index % len(prompts) for index in range(total)])

    async def one_client() -> None:
        for number in waiting:
            answer = checked(await client.generate(prompts[number], **options))
            seen.add(number, answer)
            tell(f"{way}: {len(seen.texts)} of {total}")

    tasks = [asyncio.create_task(one_client()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    seen.seconds = time.perf_counter() - begun
    return seen


def _digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def _write(path: Path, prompts: Sequence[str], max_tokens: int, texts: Mapping[int, Sequence[int]]) -> None:
    kept = {
        "prompts": _digest(prompts),
        "max_tokens": max_tokens,
        "texts": [list(texts[number]) for number in range(len(prompts))],
    }
    try:
        path.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _read(path: Path, prompts: Sequence[str], max_tokens: int) -> dict[int, list[int]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        digest, length, texts = kept["prompts"], kept["max_tokens"], kept["texts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the texts in {path}: {error}") from error
    if (digest, length) != (_digest(prompts), max_tokens):
        raise ConfigError(f"the texts in {path} are of other prompts, or of another --max-tokens ({length})")
    return dict(enumerate(texts))

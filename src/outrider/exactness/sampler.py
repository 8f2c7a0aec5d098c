"""Draws texts from a running server: many requests side by side, each with a seed of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.client import AsyncClient, Endpoint, TokenLogprob
from outrider.core.errors import OutriderError


@dataclass(frozen=True)
class Wanted:
    """One request: ``prompt`` is a number, ``tokens`` the prompt itself."""

    prompt: int
    tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Text:
    """One text that came, of one choice.

    Attributes:
        prompt: number of its prompt; ``prompt_tokens`` is the prompt itself.
        output: all its tokens, the one that ended it included.
        place: for each of them, how many of the same message came before it. Messages are rounds, or several of them
            in one: where a round begins is settled before its tokens are drawn.
        logprobs: (logprob, {token: logprob} of the most likely ones) of each token, where they were asked for.
        prompt_logprobs: log-probability of each token of the prompt, where they were asked for; None for the first.
        reproducible: whether the server promises the same text for the same seed.
        num_speculated: tokens that came in rounds with a proposal.
        num_proposed, num_accepted: tokens that a draft proposed and the target accepted, without those in whose place a
            grammar left no choice.
    """

    prompt: int
    prompt_tokens: tuple[int, ...]
    seed: int
    choice: int
    output: tuple[int, ...]
    place: tuple[int, ...]
    logprobs: tuple[tuple[float | None, dict[int, float]], ...] | None
    prompt_logprobs: tuple[float | None, ...] | None
    reproducible: bool
    verifier: str
    num_speculated: int
    num_proposed: int
    num_accepted: int


async def draw(
    address: str | Endpoint,
    wanted: Sequence[Wanted],
    options: Mapping[str, Any],
    *,
    concurrency: int,
    timeout_s: float,
    on_text: Callable[[int], None],
) -> list[Text]:
    """The texts of all requests, in their order; ``on_text`` is called with the tokens of each answer as it comes.

    All answers are waited for: dropping those that take long would drop the long ones.

    Raises:
        OutriderError: a request was refused, failed or was aborted.
    """
    limit = asyncio.Semaphore(concurrency)

    async def one(client: AsyncClient, request: Wanted) -> list[Text]:
        async with limit:
            texts = await _one(client, request, options)
        on_text(sum(len(text.output) for text in texts))
        return texts

    async with AsyncClient(address, timeout=timeout_s) as client:
        tasks = [asyncio.create_task(one(client, request)) for request in wanted]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return [text for texts in answers for text in texts]


async def _one(client: AsyncClient, request: Wanted, options: Mapping[str, Any]) -> list[Text]:
    places: dict[int, list[int]] = {}
    async with client.stream(list(request.tokens), **{**options, "seed": request.seed}) as stream:
        async for delta in stream.events():
            places.setdefault(delta.choice, []).extend(range(len(delta.token_ids)))
    texts = []
    for choice in stream.completion.choices:
        if choice.finish_reason not in ("stop", "length"):
            raise OutriderError(f"the request {stream.request_id} ended by {choice.finish_reason}")
        spec = choice.speculation
        logprobs = choice.logprobs
        texts.append(
            Text(
                prompt=request.prompt,
                prompt_tokens=request.tokens,
                seed=request.seed,
                choice=choice.index,
                output=choice.token_ids,
                place=tuple(places.get(choice.index, ())),
                logprobs=None
                if logprobs is None
                else tuple((entry.logprob, {top.token_id: top.logprob for top in entry.top}) for entry in logprobs),
                prompt_logprobs=_values(stream.completion.prompt_logprobs),
                reproducible=choice.reproducible,
                verifier=spec.verifier,
                num_speculated=spec.num_accepted_tokens + spec.num_spec_steps,
                num_proposed=spec.num_draft_tokens - spec.num_forced_tokens,
                num_accepted=spec.num_accepted_tokens - spec.num_forced_accepted,
            )
        )
    return texts


def _values(entries: Sequence[TokenLogprob] | None) -> tuple[float | None, ...] | None:
    return None if entries is None else tuple(entry.logprob for entry in entries)

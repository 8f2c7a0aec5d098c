"""Log-probabilities as OpenAI and vLLM tell them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from outrider.v1 import generation_pb2

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0  # JSON knows no infinity


def prompt_logprobs(prompt: generation_pb2.Prompt | None) -> list[Json | None]:
    """As vLLM tells them: an object by token id for each token, None for the first."""
    entries: list[Json | None] = []
    for entry in prompt.logprobs if prompt is not None else ():
        if not entry.HasField("logprob"):
            entries.append(None)
            continue
        own = {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.token}
        tops = {
            str(top.token_id): {"logprob": _finite(top.logprob), "rank": rank, "decoded_token": top.token}
            for rank, top in enumerate(entry.top, 1)
        }
        entries.append({str(entry.token_id): own, **tops})
    return entries


def chat_logprobs(entries: Sequence[generation_pb2.TokenLogprob]) -> Json:
    """As chats carry them."""
    content = []
    for entry in entries:
        tops = [_token(top.token, top.logprob) for top in entry.top]
        content.append({**_token(entry.token, entry.logprob), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _token(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode("utf-8", "replace"))}


def completion_logprobs(entries: Sequence[generation_pb2.TokenLogprob], offset: int) -> Json:
    """As completions carry them: the token itself is among the most likely ones, whatever its rank.

    ``offset``: where the first token begins in the text.
    """
    offsets: list[int] = []
    tops: list[Json | None] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
        if not entry.HasField("logprob"):
            tops.append(None)
            continue
        top = {candidate.token: _finite(candidate.logprob) for candidate in entry.top}
        top.setdefault(entry.token, _finite(entry.logprob))
        tops.append(top)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [_finite(entry.logprob) if entry.HasField("logprob") else None for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB

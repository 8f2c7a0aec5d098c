"""Plain decoding and speculation, the two ways in which most things are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.client import AsyncClient, Completion, GenerationFailed


@dataclass(frozen=True)
class Arm:
    """Attributes:
    options: of each of its requests, beside greedy decoding.
    """

    name: str
    options: dict[str, Any]


async def arms_for(client: AsyncClient, k: int | None) -> list[Arm]:
    """Plain decoding, and speculation with ``k`` tokens (None: the server's setting) unless that is 0."""
    if k is None:
        k = int((await client.status(timeout=30.0))["settings"]["num_speculative_tokens"])
    plain = Arm("plain", {"temperature": 0, "num_speculative_tokens": 0})
    return [plain, Arm(f"k={k}", {"temperature": 0, "num_speculative_tokens": k})] if k else [plain]


async def group_facts(client: AsyncClient) -> dict[str, Any]:
    """What is measured: model, precision, ranks, drafts."""
    status = await client.status(timeout=30.0)
    names = ("model", "dtype", "tensor_parallel_size", "row_invariant", "kv_blocks_total")
    return {
        "groups": [{name: group.get(name) for name in names} for group in status["groups"]],
        "drafts": [{name: draft.get(name) for name in ("drafter", "model", "state")} for draft in status["drafts"]],
        "settings": status["settings"],
    }


def checked(answer: Completion) -> Completion:
    """Raises ``GenerationFailed`` where the server gave it up."""
    if answer.finish_reason == "abort":
        raise GenerationFailed(f"the server ended the request {answer.request_id} before its end")
    return answer

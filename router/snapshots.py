"""Counts of a scheduler for status and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DraftSnapshot:
    draft_id: str
    drafter: str
    num_sessions: int
    proposal_ms: float  # from a commit to its proposal, exponentially averaged; 0 before the first
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class SpeculationSnapshot:
    """How much is speculated at the present load, and why.

    Attributes:
        level: what holds: "plain", "half" of the tokens of a round, or "full".
        is_paused: whether plain decoding was found to be faster, trials of speculation aside.
        num_streams: the load.
        goodput: tokens per second of a stream at such a load by level, measured last or predicted.
    """

    level: str = "full"
    is_paused: bool = False
    num_streams: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SchedulerSnapshot:
    """Counts since the scheduler began, and how things are now.

    Attributes:
        num_free_blocks: blocks that nobody holds, those of the prefix cache among them.
        num_cached_blocks: blocks that nobody holds and that are found by their text.
        prefix_cache_queries: tokens of texts that were looked up in the prefix cache.
        prefix_cache_hits: those of them that were found and not computed again.
        num_lookup_tokens: tokens of n-gram lookup that were verified.
        num_lookup_accepted: those of them that became text.
    """

    epoch: int
    num_waiting: int
    num_running: int
    num_steps: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_lookup_tokens: int
    num_lookup_accepted: int
    drafts: tuple[DraftSnapshot, ...]
    speculation: SpeculationSnapshot = SpeculationSnapshot()

"""Counts of a scheduler for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftSnapshot:
    draft_id: str
    drafter: str
    num_sessions: int
    proposal_ms: float  # from a commit to its proposal, exponentially averaged; 0 before the first
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class SchedulerSnapshot:
    epoch: int
    num_waiting: int
    num_running: int
    num_steps: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    drafts: tuple[DraftSnapshot, ...]

"""What an operator sets for the scheduler of a group."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cluster.config import ClusterConfig


@dataclass(frozen=True)
class SchedulerSettings:
    """How requests share a group.

    Attributes:
        max_queue: requests that may wait beside the ``max_num_seqs`` that run.
        num_speculative_tokens: for requests that name no number of their own.
        lookup_lengths: of the n-grams that are looked up to propose what followed, the shortest and the longest; None
            for no lookup.
        enable_prefix_caching: whether a request takes over what others computed of its text; as it is at the start.
        max_prefill_slowdown: how many times as long a step with rows of prompts may take, where others decode, as one
            without; 0 for no limit.
        plan_ahead: whether a step may be planned while the one before it runs (``ahead.py``).
        adapt_to_load: whether speculation gives way where more is committed without it (``governor.py``).
    """

    max_queue: int = 256
    max_num_seqs: int = 64
    num_speculative_tokens: int = 4
    lookup_lengths: tuple[int, int] | None = None
    enable_prefix_caching: bool = True
    max_prefill_slowdown: float = 1.75
    plan_ahead: bool = False
    adapt_to_load: bool = True


def scheduler_settings(config: ClusterConfig, num_speculative_tokens: int) -> SchedulerSettings:
    """Those of a settings file, with the number of speculative tokens that holds at present."""
    return SchedulerSettings(
        max_queue=config.router.max_queue,
        max_num_seqs=config.max_num_seqs,
        num_speculative_tokens=num_speculative_tokens,
        lookup_lengths=config.speculation.lookup_lengths,
        enable_prefix_caching=config.router.enable_prefix_caching,
        max_prefill_slowdown=config.router.max_prefill_slowdown,
        plan_ahead=config.router.plan_ahead,
    )

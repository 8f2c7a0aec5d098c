"""The metrics of a router, read when somebody asks from what it counts anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePath

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from outrider.metrics.declared import family, registry
from outrider.router import metric_names as names
from outrider.router.counts import SchedulerCounts
from outrider.router.frontend import Frontend
from outrider.router.goodput import Level
from outrider.router.group import Group
from outrider.router.scheduler import Scheduler

LEVELS = tuple(level.name.lower() for level in Level)
DRAFT_STATES = ("ready", "connecting", "lost", "refused")


def router_registry(frontend: Frontend, group: Callable[[], Group | None]) -> CollectorRegistry:
    """What a router tells. Ask on its event loop.

    ``group`` gives the group that it owns or waits to own; None in a router that never does.
    """

    def of_group() -> Iterator[Metric]:
        owned = group()
        if owned is not None:
            yield from group_families(owned)

    return registry("router", lambda: frontend_families(frontend), of_group)


def frontend_families(frontend: Frontend) -> Iterator[Metric]:
    """What clients meet."""
    meter = frontend.meter
    yield family(names.OPEN, frontend.num_open)
    yield family(names.DRAINING, float(frontend.draining))
    yield family(names.FINISHED, {(reason,): count for reason, count in meter.finished.items()})
    yield family(names.ERRORS, {(code,): count for code, count in meter.errors.items()})
    yield family(names.FIRST_TOKEN, meter.first_token)
    yield family(names.GAP, meter.gap)
    yield family(names.PER_TOKEN, meter.per_token)
    yield family(names.WHOLE, meter.whole)
    yield family(names.REQUEST_PROMPT, meter.prompt_tokens)
    yield family(names.REQUEST_OUTPUT, meter.generation_tokens)


def group_families(group: Group) -> Iterator[Metric]:
    """The group: where no target was attached yet, that alone."""
    yield family(names.ATTACHED, float(group.is_attached))
    scheduler = group.scheduler
    if scheduler is None:
        return
    info, snapshot, counts = scheduler.info, scheduler.snapshot(), scheduler.counts
    held = snapshot.num_blocks - snapshot.num_free_blocks
    blocks: dict[tuple[str, ...], float] = {
        ("held",): held,
        ("cached",): snapshot.num_cached_blocks,
        ("free",): snapshot.num_free_blocks - snapshot.num_cached_blocks,
    }
    # The last part of a path: the folders before it are nobody's business.
    labels = (info.group_id, PurePath(info.model).name, info.dtype)
    yield family(names.INFO, {(*labels, str(info.tensor_parallel_size), str(info.row_invariant).lower()): 1.0})
    yield family(names.EPOCH, snapshot.epoch)
    yield family(names.RESETS, counts.num_resets)
    yield family(names.RUNNING, snapshot.num_running)
    yield family(names.WAITING, snapshot.num_waiting)
    yield family(names.KV_USAGE, held / snapshot.num_blocks if snapshot.num_blocks else 0.0)
    yield family(names.KV_BLOCKS, blocks)
    yield family(names.PREFIX_QUERIES, snapshot.prefix_cache_queries)
    yield family(names.PREFIX_HITS, snapshot.prefix_cache_hits)
    yield family(names.PREEMPTIONS, snapshot.num_preemptions)
    yield family(names.PROMPT_TOKENS, counts.num_prompt_tokens)
    yield family(names.GENERATION_TOKENS, counts.num_generation_tokens)
    yield family(names.QUEUE_TIME, counts.queue_time)
    yield family(names.ROUND_TIME, counts.round_time)
    yield family(names.STEP_TIME, {(kind,): times for kind, times in group.overhead.step_time.items()})
    yield family(names.STEP_OVERHEAD, group.overhead.overhead)
    yield from speculation_families(counts, scheduler.settings.num_speculative_tokens)
    yield family(names.PAUSED_FOR_LOAD, float(snapshot.speculation.is_paused))
    yield family(names.GOODPUT, {(level,): snapshot.speculation.goodput.get(level, 0.0) for level in LEVELS})
    yield from draft_families(group, scheduler)


def speculation_families(counts: SchedulerCounts, num_speculative_tokens: int) -> Iterator[Metric]:
    """What proposals came to. There are always as many positions as the settings allow."""
    drafters = counts.drafters.values()
    longest = max(num_speculative_tokens, *(len(drafter.histogram) - 1 for drafter in drafters))
    per_position: dict[tuple[str, ...], float] = {
        (str(position),): sum(sum(drafter.histogram[position + 1 :]) for drafter in drafters)
        for position in range(longest)
    }
    yield family(names.NUM_DRAFTS, sum(drafter.num_drafts for drafter in drafters))
    yield family(names.NUM_DRAFT_TOKENS, sum(drafter.num_draft_tokens for drafter in drafters))
    yield family(names.NUM_ACCEPTED, sum(drafter.num_accepted_tokens for drafter in drafters))
    yield family(names.NUM_ACCEPTED_PER_POS, per_position)
    named = counts.drafters.items()
    yield family(names.DRAFTER_TOKENS, {(name,): drafter.num_draft_tokens for name, drafter in named})
    yield family(names.DRAFTER_ACCEPTED, {(name,): drafter.num_accepted_tokens for name, drafter in named})


def draft_families(group: Group, scheduler: Scheduler) -> Iterator[Metric]:
    """The draft workers as the router sees them, all together: each tells of itself through the supervisor."""
    known = group.drafts.drafts.values() if group.drafts is not None else ()
    states = Counter(draft.state.partition(":")[0] for draft in known)
    counts = scheduler.counts
    yield family(names.POOL, {(state,): states[state] for state in DRAFT_STATES})
    yield family(names.POOL_SESSIONS, sum(draft.num_sessions for draft in scheduler.snapshot().drafts))
    yield family(
        names.PROPOSALS,
        {("kept",): counts.num_kept_proposals, ("dropped",): counts.num_dropped_proposals},
    )
    yield family(names.PROPOSAL_TIME, scheduler.proposal_time)

"""The metrics of a draft worker, read when the supervisor asks, who adds the label ``draft``. Like a rank's they come
over the connection that Ray keeps to its actors (``workers/target/metrics.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from outrider.metrics.declared import BUILD_INFO, PROCESS, Declared, family
from outrider.workers.draft.compute import DraftStats
from outrider.workers.draft.times import DraftTimes

FAILED = Declared("outrider_draft_failed", "gauge", "1 once the worker cannot go on and waits to be replaced.")
SESSIONS = Declared("outrider_draft_sessions", "gauge", "Requests that the worker drafts for.")
KV_USAGE = Declared(
    "outrider_draft_kv_cache_usage_perc", "gauge", "Share of the KV blocks that sessions hold, as a ratio from 0 to 1."
)
STEPS = Declared("outrider_draft_steps_total", "counter", "Steps that the worker ran.")
ROWS = Declared("outrider_draft_rows_total", "counter", "Rows that ran.")
STEP_TIME = Declared("outrider_draft_step_time_seconds", "histogram", "A step of the worker.")
PROPOSALS = Declared("outrider_draft_proposals_total", "counter", "Proposals that were sent.")
TOKENS = Declared("outrider_draft_proposed_tokens_total", "counter", "Tokens of them.")
ACCEPTED = Declared("outrider_draft_accepted_tokens_total", "counter", "Those of them that became text.")
PROPOSAL_TIME = Declared(
    "outrider_draft_proposal_time_seconds", "histogram", "From a commit at the worker to the proposal that answers it."
)
EVICTIONS = Declared(
    "outrider_draft_evictions_total",
    "counter",
    "Sessions that the worker dropped, by why; unspecified is a message that it could not serve.",
    ("reason",),
)

DRAFT = (
    *(BUILD_INFO, FAILED, SESSIONS, KV_USAGE, STEPS, ROWS, STEP_TIME),
    *(PROPOSALS, TOKENS, ACCEPTED, PROPOSAL_TIME, EVICTIONS, *PROCESS),
)


def draft_families(stats: DraftStats, times: DraftTimes, *, failed: bool) -> Iterator[Metric]:
    """What a worker tells."""
    held = stats.blocks - stats.free_blocks
    yield family(FAILED, float(failed))
    yield family(SESSIONS, stats.sessions)
    yield family(KV_USAGE, held / stats.blocks if stats.blocks else 0.0)
    yield family(STEPS, stats.steps)
    yield family(ROWS, times.num_rows)
    yield family(STEP_TIME, times.step)
    yield family(PROPOSALS, stats.proposals)
    yield family(TOKENS, stats.num_draft_tokens)
    yield family(ACCEPTED, stats.num_accepted_tokens)
    yield family(PROPOSAL_TIME, times.proposal)
    yield family(EVICTIONS, {(reason,): count for reason, count in times.evictions.items()})

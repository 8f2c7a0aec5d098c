"""The metrics of a rank, read when the supervisor asks.

It has no port of its own: the supervisor calls it as it does for its health, over the connection that Ray keeps to its
actors anyway, so that there is nothing more to open, to find or to guard on each node, and a rank that is rebuilt is
found again by itself. The supervisor adds the label ``rank``.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from outrider.metrics.declared import BUILD_INFO, PROCESS, Declared, family
from outrider.workers.target.times import StepTimes

EPOCH = Declared("outrider_target_epoch", "gauge", "Epoch of the group that the rank belongs to.")
FAILED = Declared("outrider_target_failed", "gauge", "1 once the rank cannot go on and waits to be replaced.")
STEPS = Declared("outrider_target_steps_total", "counter", "Steps that the rank ran.")
ROWS = Declared("outrider_target_rows_total", "counter", "Rows, tokens of prompts and proposals among them, that ran.")
SEQUENCES = Declared("outrider_target_sequences", "gauge", "Sequences whose keys and values the rank holds.")
PHASE_TIME = Declared(
    "outrider_target_step_time_seconds",
    "histogram",
    "Parts of a step: taking in the plan and handing it on (plan), the pass (forward), exchange and decision (verify).",
    ("phase",),
)
KV_BYTES = Declared("outrider_target_kv_cache_bytes", "gauge", "Memory of the rank's keys and values.")

RANK = (BUILD_INFO, EPOCH, FAILED, STEPS, ROWS, SEQUENCES, PHASE_TIME, KV_BYTES, *PROCESS)


def rank_families(
    *, epoch: int, failed: bool, steps: int, sequences: int, kv_cache_bytes: int, times: StepTimes
) -> Iterator[Metric]:
    """What a rank tells."""
    yield family(EPOCH, epoch)
    yield family(FAILED, float(failed))
    yield family(STEPS, steps)
    yield family(ROWS, times.num_rows)
    yield family(SEQUENCES, sequences)
    yield family(PHASE_TIME, {(phase,): seconds for phase, seconds in times.phases.items()})
    yield family(KV_BYTES, kv_cache_bytes)

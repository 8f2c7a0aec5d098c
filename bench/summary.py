"""From records to figures. Times are in milliseconds, rates in tokens a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from outrider.bench.numbers import Distribution, Pair, Ratio, speed_ratio
from outrider.bench.records import Record, sound
from outrider.bench.run import PLAIN, BenchRun, Block
from outrider.client import Speculation

ALL = "all"


def summarise(run: BenchRun) -> dict[str, Any]:
    """What ``--json`` prints but the single requests."""
    names = [workload.name for workload in run.settings.workloads]
    groups = [*names, ALL] if len(names) > 1 else names
    settings = run.settings
    return {
        "complete": run.complete,
        "server": _server(run.status),
        "load": {
            "mode": "closed" if settings.rate is None else "open",
            "concurrency": settings.concurrency if settings.rate is None else None,
            "rate": settings.rate,
            "requests": settings.requests,
            "blocks": settings.blocks,
            "seed": settings.seed,
            "max_tokens": settings.max_tokens,
            "tag_prompts": settings.tag_prompts,
            "num_speculative_tokens": settings.num_speculative_tokens,
            "options": settings.options,
            "workloads": {workload.name: workload.source for workload in settings.workloads},
        },
        "workloads": {name: _workload(run, name) for name in groups},
    }


def _workload(run: BenchRun, name: str) -> dict[str, Any]:
    def of(arm: str) -> tuple[list[Record], list[Block]]:
        records = [record for record in run.records if record.arm == arm and name in (ALL, record.workload)]
        return records, [block for block in run.blocks if block.arm == arm and name in (ALL, block.workload)]

    arms = {arm: of(arm) for arm in run.arms}
    base_records, base_blocks = arms[PLAIN]
    ratios = {}
    for arm, (records, blocks) in arms.items():
        if arm != PLAIN:
            ratios[arm] = {
                "speed": _ratio_dict(speed_ratio(request_pairs(base_records, records), seed=run.settings.seed)),
                "throughput": _ratio_dict(speed_ratio(block_pairs(base_blocks, blocks), seed=run.settings.seed)),
            }
    return {"arms": {arm: arm_figures(*seen) for arm, seen in arms.items()}, "over_plain": ratios}


def arm_figures(records: Sequence[Record], blocks: Sequence[Block]) -> dict[str, Any]:
    """Of one arm in one workload."""
    good = sound(records)
    wall_s = sum(block.wall_s for block in blocks)
    tokens = sum(block.tokens for block in blocks)
    joules = [block.joules for block in blocks if block.joules is not None]
    refused = [record for record in records if record.refused]
    failed = [record for record in records if record.error is not None and not record.refused]
    return {
        "requests": len(records),
        "refused": len(refused),
        "failed": len(failed),
        "errors": [line for line, _ in Counter(str(r.error) for r in (*failed, *refused)).most_common(3)],
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "completion_tokens": sum(record.tokens for record in good),
        "ttft_ms": _ms(record.ttft_s for record in good if record.ttft_s is not None),
        "message_gap_ms": _ms(gap for record in good for gap in record.message_gaps_s),
        "token_gap_ms": _ms(gap for record in good for gap in record.token_gaps_s),
        "total_ms": _ms(record.seconds for record in good),
        "request_tokens_per_s": _spread((record.tokens / record.seconds for record in good if record.seconds > 0), 1),
        "decode_tokens_per_s": _spread((r.decode_rate for r in good if r.decode_rate is not None), 1),
        "total_tokens_per_s": _rounded(tokens / wall_s if wall_s else None),
        "late_ms": _ms(record.begun - record.due for record in good),
        "speculation": speculation_figures(good),
        "kv_occupancy": _occupancy(blocks),
        "joules_per_token": _rounded(sum(joules) / tokens if joules and tokens else None),
    }


def speculation_figures(records: Sequence[Record]) -> dict[str, Any] | None:
    """What the server says that speculation did, over all requests; None where it says nothing."""
    told = [record.speculation for record in records if record.speculation is not None]
    if not told:
        return None
    tokens = sum(record.tokens for record in records if record.speculation is not None)

    def total(of: Callable[[Speculation], int]) -> int:
        return sum(of(each) for each in told)

    steps, drafted = total(lambda s: s.num_spec_steps), total(lambda s: s.num_draft_tokens)
    accepted, calls = total(lambda s: s.num_accepted_tokens), total(lambda s: s.target_calls)
    length = max((len(each.acceptance_histogram) for each in told), default=0)
    histogram = [0] * length
    for each in told:
        for place, count in enumerate(each.acceptance_histogram):
            histogram[place] += count
    return {
        "drafters": sorted({each.drafter for each in told if each.drafter}),
        "verifiers": sorted({each.verifier for each in told}),
        "accepted_length": _rounded(accepted / steps if steps else None),
        "tokens_per_speculative_step": _rounded(1 + accepted / steps if steps else None),
        "acceptance_rate": _rounded(accepted / drafted if drafted else None),
        "accepted_length_histogram": histogram,
        "draft_tokens_per_token": _rounded(drafted / tokens if tokens else None),
        "target_calls_per_token": _rounded(calls / tokens if tokens else None),
        "speculative_steps": steps,
        "target_calls": calls,
    }


def request_pairs(base: Sequence[Record], records: Sequence[Record]) -> list[Pair]:
    """The requests that went well in both arms."""
    known = {(record.workload, record.index): record for record in sound(base)}
    pairs = []
    for record in sound(records):
        other = known.get((record.workload, record.index))
        if other is not None and other.tokens and record.tokens:
            pairs.append(Pair(other.tokens, other.seconds, record.tokens, record.seconds))
    return pairs


def block_pairs(base: Sequence[Block], blocks: Sequence[Block]) -> list[Pair]:
    """The same blocks of both arms: all tokens over the time of the block."""
    known = {(block.workload, block.number): block for block in base}
    return [
        Pair(other.tokens, other.wall_s, block.tokens, block.wall_s)
        for block in blocks
        if (other := known.get((block.workload, block.number))) is not None and other.tokens and block.tokens
    ]


def _server(status: dict[str, Any]) -> dict[str, Any]:
    names = ("group_id", "model", "dtype", "tensor_parallel_size", "row_invariant", "kv_blocks_total")
    return {
        "cluster": status.get("cluster"),
        "groups": [{name: group.get(name) for name in names} for group in status.get("groups", ())],
        "drafts": [
            {name: draft.get(name) for name in ("draft_id", "drafter", "model", "placement", "state")}
            for draft in status.get("drafts", ())
        ],
        "settings": status.get("settings"),
    }


def _occupancy(blocks: Sequence[Block]) -> dict[str, float] | None:
    seen = [share for block in blocks for share in block.cache.occupancy]
    if not seen:
        return None
    return {"mean": round(sum(seen) / len(seen), 4), "max": round(max(seen), 4)}


def _ms(seconds: Iterable[float]) -> dict[str, float] | None:
    return _spread(seconds, 1000)


def _spread(values: Iterable[float], factor: float) -> dict[str, float] | None:
    distribution = Distribution.of([factor * value for value in values])
    if distribution is None:
        return None
    return {name: value if name == "count" else round(value, 4) for name, value in asdict(distribution).items()}


def _ratio_dict(ratio: Ratio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    interval = None if ratio.low is None or ratio.high is None else [round(ratio.low, 4), round(ratio.high, 4)]
    return {"ratio": round(ratio.value, 4), "interval_95": interval, "pairs": ratio.pairs}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

"""The figures of a run for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.table import Table

COLUMNS = (
    "arm",
    "requests",
    "tok/s in all",
    "tok/s each",
    "TTFT ms\n p50 / p90 / p99",
    "message gap ms\n p50 / p90 / p99",
    "gap per token ms\n p50 / p90 / p99",
    "accepted\nlength",
    "drafted\nper token",
    "target calls\nper token",
    "KV use\nmost",
    "J/token",
    "speed over plain\n[95 % interval]",
)


def show(summary: dict[str, Any], console: Console) -> None:
    """One table for each workload."""
    load = summary["load"]
    how = f"{load['concurrency']} at once" if load["mode"] == "closed" else f"{load['rate']:g} a second (Poisson)"
    models = ", ".join(f"{group['model']} {group['dtype']}" for group in summary["server"]["groups"])
    console.print(f"{models}; {how}, {load['requests']} requests for each arm, seed {load['seed']}")
    console.print(Group(*(_table(name, figures) for name, figures in summary["workloads"].items())))
    for line in _errors(summary):
        console.print(line, markup=False)
    if not summary["complete"]:
        console.print("the deadline passed: not every request was sent")


def _table(name: str, figures: dict[str, Any]) -> Table:
    table = Table(title=name, title_justify="left")
    rows = [_row(arm, values, figures["over_plain"].get(arm) or {}) for arm, values in figures["arms"].items()]
    shown = [index for index in range(len(COLUMNS)) if any(row[index] for row in rows)]
    for index in shown:
        table.add_column(COLUMNS[index], justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    return table


def _row(arm: str, values: dict[str, Any], over_plain: dict[str, Any]) -> list[str]:
    """A cell for each column; empty where there is nothing to say."""
    speculation = values["speculation"] or {}
    cache = values["kv_occupancy"]
    missing = values["refused"] + values["failed"]
    return [
        arm,
        f"{values['requests'] - missing} of {values['requests']}" if missing else str(values["requests"]),
        _number(values["total_tokens_per_s"], 1),
        _number((values["request_tokens_per_s"] or {}).get("p50"), 1),
        *(_percentiles(values[key]) for key in ("ttft_ms", "message_gap_ms", "token_gap_ms")),
        _number(speculation.get("accepted_length"), 2),
        _number(speculation.get("draft_tokens_per_token"), 2),
        _number(speculation.get("target_calls_per_token"), 2),
        "" if cache is None else f"{100 * cache['max']:.0f} %",
        _number(values["joules_per_token"], 2),
        _ratio(over_plain.get("speed")),
    ]


def _errors(summary: dict[str, Any]) -> list[str]:
    """The most frequent error of each arm, where there is one."""
    return [
        f"{name}, {arm}: {values['errors'][0]}"
        for name, figures in summary["workloads"].items()
        for arm, values in figures["arms"].items()
        if values["errors"] and name != "all"
    ]


def _percentiles(values: dict[str, float] | None) -> str:
    return "" if values is None else f"{values['p50']:.1f} / {values['p90']:.1f} / {values['p99']:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return ""
    interval = ratio["interval_95"]
    return f"{ratio['ratio']:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")

"""Pictures of a run: gaps, first tokens, accepted lengths and speed, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.bench.records import Record, sound
from outrider.bench.run import BenchRun
from outrider.client import ConfigError


def draw(run: BenchRun, summary: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures into a folder, which is made. Raises ``ConfigError`` without matplotlib or the folder."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib ({error}): pip install 'outrider[bench]'") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, picture in PICTURES.items():
            figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
            picture(axes, run, summary)
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=120)
            pyplot.close(figure)
            written.append(path)
    except OSError as error:
        raise ConfigError(f"cannot write plots into {folder}: {error}") from error
    return written


def _of(run: BenchRun, arm: str) -> list[Record]:
    return sound([record for record in run.records if record.arm == arm])


def _cumulative(axes: Any, values: Sequence[float], label: str) -> None:
    """The share of values up to each of them."""
    if values:
        ordered = sorted(values)
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=label)


def _gaps(axes: Any, run: BenchRun, _: dict[str, Any]) -> None:
    for arm in run.arms:
        records = _of(run, arm)
        _cumulative(axes, [1000 * gap for r in records for gap in r.message_gaps_s], f"{arm}: between messages")
        _cumulative(axes, [1000 * gap for r in records for gap in r.token_gaps_s], f"{arm}: per token")
    axes.set(title="Inter-token latency", xlabel="ms", ylabel="share of gaps up to that", xscale="log")
    axes.legend()


def _first_tokens(axes: Any, run: BenchRun, _: dict[str, Any]) -> None:
    for arm in run.arms:
        _cumulative(axes, [1000 * r.ttft_s for r in _of(run, arm) if r.ttft_s is not None], arm)
    axes.set(title="Time to first token", xlabel="ms", ylabel="share of requests up to that", xscale="log")
    axes.legend()


def _accepted(axes: Any, run: BenchRun, summary: dict[str, Any]) -> None:
    shown = 0
    names = [workload.name for workload in run.settings.workloads]
    for index, name in enumerate(names):
        speculation = summary["workloads"][name]["arms"]["speculative"]["speculation"]
        histogram = speculation["accepted_length_histogram"] if speculation else []
        total = sum(histogram)
        if total:
            width = 0.8 / len(names)
            places = [length + (index - (len(names) - 1) / 2) * width for length in range(len(histogram))]
            axes.bar(places, [count / total for count in histogram], width, label=name)
            shown += 1
    axes.set(title="Accepted tokens of a proposal", xlabel="tokens", ylabel="share of rounds with a proposal")
    if shown:
        axes.legend()


def _speed(axes: Any, run: BenchRun, summary: dict[str, Any]) -> None:
    names = list(summary["workloads"])
    for place, arm in enumerate(run.arms):
        width = 0.8 / len(run.arms)
        rates = [summary["workloads"][name]["arms"][arm]["total_tokens_per_s"] or 0.0 for name in names]
        places = [index + (place - (len(run.arms) - 1) / 2) * width for index in range(len(names))]
        axes.bar(places, rates, width, label=arm)
    axes.set_xticks(range(len(names)), names)
    axes.set(title="Tokens a second, all requests together", ylabel="tokens / s")
    axes.legend()


PICTURES: dict[str, Callable[[Any, BenchRun, dict[str, Any]], None]] = {
    "inter-token-latency": _gaps,
    "time-to-first-token": _first_tokens,
    "accepted-length": _accepted,
    "tokens-per-second": _speed,
}

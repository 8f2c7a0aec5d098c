"""Pictures as PNG files: of a run gaps, first tokens, accepted lengths and speed; of a profile what passes cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from outrider.bench.records import Record, sound
from outrider.bench.run import BenchRun
from outrider.client import ConfigError

Picture = Callable[[Any], None]


def draw(run: BenchRun, summary: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures of a run into a folder, which is made.

    Raises ``ConfigError`` without matplotlib, or where the folder cannot be written.
    """
    return _written({name: partial(picture, run=run, summary=summary) for name, picture in PICTURES.items()}, folder)


def draw_costs(facts: dict[str, Any], folder: Path) -> list[Path]:
    """The same of what ``outrider profile --json`` prints: passes by rows, by context and by sequences.

    A picture for what has one value only is left out, but for that by rows.
    """
    pictures: dict[str, Picture] = {
        "pass-by-rows": partial(_passes, facts=facts, relative=False),
        "pass-by-rows-of-one": partial(_passes, facts=facts, relative=True),
    }
    for axis, name in (("context", "pass-by-context"), ("num_sequences", "pass-by-sequences")):
        if len({cost[axis] for cost in facts["passes"]}) > 1:
            pictures[name] = partial(_passes_along, facts=facts, axis=axis)
    return _written(pictures, folder)


def _written(pictures: Mapping[str, Picture], folder: Path) -> list[Path]:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib ({error}): pip install 'outrider[bench]'") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, picture in pictures.items():
            figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
            picture(axes)
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


def _gaps(axes: Any, run: BenchRun, summary: dict[str, Any]) -> None:
    for arm in run.arms:
        records = _of(run, arm)
        _cumulative(axes, [1000 * gap for r in records for gap in r.message_gaps_s], f"{arm}: between messages")
        _cumulative(axes, [1000 * gap for r in records for gap in r.token_gaps_s], f"{arm}: per token")
    axes.set(title="Inter-token latency", xlabel="ms", ylabel="share of gaps up to that", xscale="log")
    axes.legend()


def _first_tokens(axes: Any, run: BenchRun, summary: dict[str, Any]) -> None:
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


def _passes(axes: Any, facts: dict[str, Any], relative: bool) -> None:
    """A line for each batch and context; those over one or two numbers of rows only where there are no longer ones."""
    lines: dict[tuple[int, int], dict[int, float]] = {}
    for cost in facts["passes"]:
        line = lines.setdefault((cost["num_sequences"], cost["context"]), {})
        line[cost["rows"]] = cost["forward_ms"]["p50"]
    longest = max((len(line) for line in lines.values()), default=0)
    for (count, context), line in lines.items():
        rows = sorted(line)
        unit = line[rows[0]] if relative else 1.0
        if unit and len(line) >= min(3, longest):
            label = f"{count} x {context} positions" if count > 1 else f"{context} positions"
            axes.plot(rows, [line[each] / unit for each in rows], marker="o", label=label)
    title = "Pass over several rows, of one over the fewest" if relative else "Forward pass"
    axes.set(title=title, xlabel="rows of each sequence (k + 1)", ylabel="ratio" if relative else "ms")
    axes.set_ylim(bottom=0)
    if lines:
        axes.legend()


def _passes_along(axes: Any, facts: dict[str, Any], axis: str) -> None:
    """Over contexts or sequences: a line for each number of rows, and the least of the third."""
    third = "num_sequences" if axis == "context" else "context"
    least = min(cost[third] for cost in facts["passes"])
    lines: dict[int, dict[int, float]] = {}
    for cost in facts["passes"]:
        if cost[third] == least:
            lines.setdefault(cost["rows"], {})[cost[axis]] = cost["forward_ms"]["p50"]
    for rows, line in sorted(lines.items()):
        if len(line) > 1:
            places = sorted(line)
            label = f"{rows} rows of each" if rows > 1 else "1 row of each"
            axes.plot(places, [line[place] for place in places], marker="o", label=label)
    words = "positions in the cache" if axis == "context" else "sequences of a pass"
    where = f"{least} sequence(s)" if axis == "context" else f"{least} positions each"
    axes.set(title=f"Forward pass, {where}", xlabel=words, ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend()


PICTURES: dict[str, Callable[..., None]] = {
    "inter-token-latency": _gaps,
    "time-to-first-token": _first_tokens,
    "accepted-length": _accepted,
    "tokens-per-second": _speed,
}

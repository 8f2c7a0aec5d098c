"""docs/metrics.md as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

METRICS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]+) \| `(.+)` \|$")


@dataclass(frozen=True)
class Row:
    """One metric as the page tells it."""

    section: str
    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    meaning: str
    promql: str


def rows_of(page: Path) -> Iterator[Row]:
    """The rows of its tables of metrics. Raises ``ValueError`` for a row that is like none."""
    section = ""
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not line.startswith(("| `outrider_", "| `process_")):
            continue
        match = _ROW.match(line)
        if match is None:
            raise ValueError(f"no row of a metric: {line}")
        name, kind, unit, labels, meaning, promql = match.groups()
        named = tuple(re.findall(r"`(\w+)`", labels))
        yield Row(section, name, kind, unit.strip(), named, meaning.strip(), promql.replace("\\|", "|"))

"""docs/metrics.md against what the processes declare."""

from __future__ import annotations

import re

import pytest

from outrider.cluster.metrics import SUPERVISOR
from outrider.metrics.declared import Declared
from outrider.router.metric_names import ROUTER
from outrider.workers.draft.metrics import DRAFT
from outrider.workers.target.metrics import RANK
from outrider_metrics_page import METRICS_PAGE, Row, rows_of

# Every process tells the metrics of this section.
EVERYWHERE = "Every process"
SECTIONS = {"Routers": ROUTER, "Ranks": RANK, "Draft workers": DRAFT, "Supervisors": SUPERVISOR}
UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_perc": "ratio", "_tokens": "tokens"}
ROWS = list(rows_of(METRICS_PAGE))


def test_each_section_has_the_metrics_of_its_process_and_no_others() -> None:
    common = {row.name for row in ROWS if row.section == EVERYWHERE}
    assert {row.section for row in ROWS} == {EVERYWHERE, *SECTIONS}
    for section, declared in SECTIONS.items():
        told = [row.name for row in ROWS if row.section == section]
        assert len(told) == len(set(told))
        assert {*told, *common} == {metric.name for metric in declared}, section
        assert not common & set(told)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.section}-{row.name}" for row in ROWS])
def test_a_row_says_what_is_declared(row: Row) -> None:
    of_section: dict[str, Declared] = {metric.name: metric for metric in SECTIONS.get(row.section, ROUTER)}
    declared = of_section[row.name]
    assert (row.kind, row.labels) == (declared.kind, declared.labels)
    assert row.meaning
    stem = row.name.removesuffix("_total")
    unit = next((unit for end, unit in UNITS.items() if stem.endswith(end)), None)
    assert row.unit == unit if unit is not None else row.unit
    stems = {row.name, *(row.name + end for end in ("_bucket", "_sum", "_count"))}
    assert stems & set(re.findall(r"\w+", row.promql)), "the example asks for another metric"
    for help_of in (declared.help,):
        assert help_of.endswith(".")


def test_no_metric_is_declared_twice() -> None:
    for declared in SECTIONS.values():
        listed = [metric.name for metric in declared]
        assert len(listed) == len(set(listed))


def test_every_metric_is_named_elsewhere_on_the_page_only_if_it_exists() -> None:
    known = {metric.name for declared in SECTIONS.values() for metric in declared}
    known |= {name + end for name in known for end in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"\b(?:outrider|process)_[a-z0-9_]+", METRICS_PAGE.read_text()))
    assert named - known == set()

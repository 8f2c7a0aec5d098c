"""Metrics as data, and their values as Prometheus' client library writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider import __version__
from outrider.core.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Value = float | Histogram
Families = Iterable[Metric]


@dataclass(frozen=True)
class Declared:
    """One metric.

    Attributes:
        name: with the unit, and ``_total`` if it is a counter.
        labels: their names. The values are few, whatever clients send.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


BUILD_INFO = Declared("outrider_build_info", "gauge", "Always 1; the labels say what runs.", ("component", "version"))

# What Prometheus' client library tells of a process.
PROCESS = (
    Declared("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."),
    Declared("process_resident_memory_bytes", "gauge", "Resident memory size in bytes."),
    Declared("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."),
    Declared("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."),
    Declared("process_open_fds", "gauge", "Number of open file descriptors."),
    Declared("process_max_fds", "gauge", "Maximum number of open file descriptors."),
)


def family(declared: Declared, values: Value | Mapping[tuple[str, ...], Value]) -> Metric:
    """A metric with its value, or with one for each combination of label values."""
    by_labels = values if isinstance(values, Mapping) else {(): values}
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    made = kinds[declared.kind](declared.name, declared.help, labels=declared.labels)
    for labels, value in by_labels.items():
        if isinstance(made, HistogramMetricFamily) and isinstance(value, Histogram):
            made.add_metric(labels, [(floatToGoString(bound), count) for bound, count in value.cumulative()], value.sum)
        elif isinstance(made, CounterMetricFamily | GaugeMetricFamily) and not isinstance(value, Histogram):
            made.add_metric(labels, value)
        else:
            raise TypeError(f"{declared.name} is a {declared.kind}, but its value is {value!r}")
    return made


class Source(Collector):
    """Families that are made whenever somebody asks."""

    def __init__(self, collect: Callable[[], Families]) -> None:
        self._collect = collect

    def collect(self) -> Families:
        return self._collect()

    def describe(self) -> Families:
        """Nothing: what a registry would check at the start is there only once the process works."""
        return ()


def registry(component: str, *sources: Callable[[], Families]) -> CollectorRegistry:
    """What a process tells: ``sources``, the process itself, and which version of which component it is."""
    made = CollectorRegistry()
    made.register(Source(lambda: (family(BUILD_INFO, {(component, __version__): 1.0}),)))
    ProcessCollector(registry=made)
    for source in sources:
        made.register(Source(source))
    return made


def text(told: Collector) -> str:
    """In Prometheus' text format."""
    return generate_latest(told).decode()

"""What a supervisor tells Prometheus: how its parts are, and what ranks and draft workers say of themselves.

Those are asked whenever somebody reads, at once and with a deadline: one that is stuck is missing from that answer, and
``outrider_rank_up`` or ``outrider_draft_up`` says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from outrider.core.errors import GroupError
from outrider.metrics.declared import BUILD_INFO, PROCESS, Declared, Source, family, registry, text

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 4.0  # Prometheus itself gives up after ten seconds, unless told otherwise

READY = Declared("outrider_supervisor_ready", "gauge", "1 once the target serves.")
EPOCH = Declared("outrider_supervisor_target_epoch", "gauge", "Epoch of the target group that was started last.")
REBUILDS = Declared(
    "outrider_supervisor_target_rebuilds_total", "counter", "Times that the target group was started again."
)
DRAFT_RESTARTS = Declared(
    "outrider_supervisor_draft_restarts_total", "counter", "Times that a draft worker was started again.", ("draft",)
)
ROUTER_RESTARTS = Declared(
    "outrider_supervisor_router_restarts_total",
    "counter",
    "Times that the router was started again, where the supervisor runs it.",
)
RANK_UP = Declared("outrider_rank_up", "gauge", "1 where a rank answered this scrape.", ("rank",))
DRAFT_UP = Declared("outrider_draft_up", "gauge", "1 where a draft worker answered this scrape.", ("draft",))

SUPERVISOR = (BUILD_INFO, READY, EPOCH, REBUILDS, DRAFT_RESTARTS, ROUTER_RESTARTS, RANK_UP, DRAFT_UP, *PROCESS)


class Worker(Protocol):
    """A process that tells its metrics (``ray_cluster.Actor``)."""

    async def call(self, method: str, *, timeout_s: float) -> str: ...


@dataclass(frozen=True)
class Parts:
    """What a supervisor has started so far.

    Attributes:
        ranks, drafts: by number and by seat; None for one that does not serve now.
        rebuilds, router_restarts: how often each was started again.
        draft_restarts: the same for each seat.
    """

    ready: bool = False
    epoch: int = 0
    rebuilds: int = 0
    router_restarts: int = 0
    draft_restarts: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, Worker | None] = field(default_factory=dict)
    drafts: Mapping[str, Worker | None] = field(default_factory=dict)


class SupervisorMetrics:
    """Asks and puts together. ``tell`` may be called at any time, by several at once."""

    def __init__(self, parts: Callable[[], Parts], timeout_s: float = ASK_TIMEOUT_S) -> None:
        self._parts = parts
        self._timeout_s = timeout_s

    async def tell(self) -> str:
        parts = self._parts()
        ranks, drafts = await asyncio.gather(
            ask(parts.ranks, self._timeout_s),
            ask(parts.drafts, self._timeout_s),
        )
        return await asyncio.to_thread(put_together, parts, ranks, drafts)


async def ask(workers: Mapping[str, Worker | None], timeout_s: float) -> dict[str, str | None]:
    """What each worker tells; None for one that does not answer in time or does not serve."""

    async def one(name: str, worker: Worker | None) -> tuple[str, str | None]:
        try:
            return name, await worker.call("metrics", timeout_s=timeout_s) if worker is not None else None
        except GroupError as error:
            log.debug("no metrics of %s: %s", name, error)
            return name, None

    return dict(await asyncio.gather(*(one(name, worker) for name, worker in workers.items())))


def put_together(parts: Parts, ranks: Mapping[str, str | None], drafts: Mapping[str, str | None]) -> str:
    """One text of the supervisor's own metrics and of those that came, each with the label that says whose it is."""
    up: dict[str, dict[tuple[str, ...], float]] = {
        label: {(name,): float(answer is not None) for name, answer in answers.items()}
        for label, answers in (("rank", ranks), ("draft", drafts))
    }

    def own() -> Iterator[Metric]:
        yield family(READY, float(parts.ready))
        yield family(EPOCH, parts.epoch)
        yield family(REBUILDS, parts.rebuilds)
        yield family(DRAFT_RESTARTS, {(draft,): count for draft, count in parts.draft_restarts.items()})
        yield family(ROUTER_RESTARTS, parts.router_restarts)
        yield family(RANK_UP, up["rank"])
        yield family(DRAFT_UP, up["draft"])

    told = [
        labelled(answer, label, name)
        for label, answers in (("rank", ranks), ("draft", drafts))
        for name, answer in answers.items()
        if answer is not None
    ]
    families = merged([registry("supervisor", own).collect(), *told])
    whole = CollectorRegistry()
    whole.register(Source(lambda: families))
    return text(whole)


def labelled(told: str, label: str, value: str) -> list[Metric]:
    """The families of a text, with one more label on each sample."""
    families = []
    for told_family in text_string_to_metric_families(told):
        told_family.samples = [
            sample._replace(labels={**sample.labels, label: value}) for sample in told_family.samples
        ]
        families.append(told_family)
    return families


def merged(groups: Iterable[Iterable[Metric]]) -> list[Metric]:
    """The families of several processes: one for each name."""
    by_name: dict[str, Metric] = {}
    for group in groups:
        for one in group:
            if one.name in by_name:
                by_name[one.name].samples.extend(one.samples)
            else:
                by_name[one.name] = one
    return list(by_name.values())

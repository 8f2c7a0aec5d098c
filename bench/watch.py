"""What is read beside the load: cache use from the server's status, energy from the processor's counters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from outrider.client import AsyncClient, OutriderError

POWERCAP = Path("/sys/class/powercap")
POLL_S = 0.25


@dataclass
class CacheUse:
    """Shares of the KV blocks that were in use, as far as status said, and how many requests were there."""

    occupancy: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)


@contextlib.asynccontextmanager
async def watched(client: AsyncClient, use: CacheUse, poll_s: float = POLL_S) -> AsyncIterator[None]:
    """Within it, ``use`` grows with each look at the status; a server that does not answer leaves a gap."""
    task = asyncio.create_task(_watch(client, use, poll_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _watch(client: AsyncClient, use: CacheUse, poll_s: float) -> None:
    while True:
        await asyncio.sleep(poll_s)
        with contextlib.suppress(OutriderError):
            status = await client.status(timeout=5.0)
            total = sum(group["kv_blocks_total"] for group in status["groups"])
            free = sum(group["kv_blocks_free"] for group in status["groups"])
            if total:
                use.occupancy.append(1 - free / total)
            use.running.append(status["running"])
            use.queued.append(status["queued"])


@dataclass(frozen=True)
class Energy:
    """Counters of the processor packages (RAPL), where they can be read. Other programs' energy is in them too."""

    zones: tuple[Path, ...]

    @staticmethod
    def find(folder: Path = POWERCAP) -> Energy | None:
        """None on machines without them, or where they are not ours to read."""
        zones = []
        for zone in sorted(folder.glob("*-rapl:*")):
            with contextlib.suppress(OSError, ValueError):
                if (zone / "name").read_text().startswith("package"):
                    _counter(zone, "energy_uj")
                    zones.append(zone)
        return Energy(tuple(zones)) if zones else None

    def read(self) -> tuple[int, ...]:
        """Microjoules of each package since some time."""
        return tuple(_counter(zone, "energy_uj") for zone in self.zones)

    def joules(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """What was used from one reading to the next; a counter may have begun anew once in between."""
        total = 0
        for zone, start, end in zip(self.zones, before, after, strict=True):
            total += end - start if end >= start else end - start + _counter(zone, "max_energy_range_uj")
        return total / 1e6


def _counter(zone: Path, name: str) -> int:
    return int((zone / name).read_text())

"""Settings that change while the server runs: kept in the registry, followed by every router of the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.cluster.registry import Registry
from outrider.core.errors import InvalidRequest, Unavailable
from outrider.core.sampling import Verifier
from outrider.router.limits import MAX_SPECULATIVE_TOKENS
from outrider.v1 import admin_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveSettings:
    """What requests take where they say nothing.

    Attributes:
        verifier: for requests that sample: REJECTION or COUPLED.
    """

    num_speculative_tokens: int
    verifier: Verifier

    def to_wire(self) -> admin_pb2.LiveSettings:
        return admin_pb2.LiveSettings(
            num_speculative_tokens=self.num_speculative_tokens,
            verifier=int(self.verifier),  # type: ignore[arg-type]
        )


class SettingsFollower:
    """The cluster's live settings over the file's; calls ``changed`` whenever they differ from before."""

    def __init__(
        self, registry: Registry, initial: LiveSettings, changed: Callable[[LiveSettings], None], *, poll_s: float
    ) -> None:
        self.current = initial
        self._registry = registry
        self._initial = initial
        self._changed = changed
        self._poll_s = poll_s

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        while True:
            try:
                await self.refresh()
            except Unavailable as error:
                log.debug("%s", error)
            await asyncio.sleep(self._poll_s)

    async def refresh(self) -> None:
        """Take the registry's settings. Raises ``Unavailable``."""
        settings = merged(self._initial, await self._registry.get_settings())
        if settings != self.current:
            log.info("live settings: %s", settings)
            self.current = settings
            self._changed(settings)

    async def update(self, change: admin_pb2.LiveSettings) -> LiveSettings:
        """Change settings for the whole cluster. Raises ``InvalidRequest`` or ``Unavailable``."""
        await self._registry.set_settings(changes_from_wire(change))
        await self.refresh()
        return self.current


def merged(initial: LiveSettings, stored: dict[str, Any]) -> LiveSettings:
    """The file's settings with the registry's over them; a stored value that makes no sense is left out and logged."""
    settings = initial
    number = stored.get("num_speculative_tokens")
    if isinstance(number, int) and 0 <= number <= MAX_SPECULATIVE_TOKENS:
        settings = replace(settings, num_speculative_tokens=number)
    elif number is not None:
        log.warning("num_speculative_tokens in the registry is %r; ignored", number)
    name = stored.get("verifier")
    if name in (Verifier.COUPLED.label, Verifier.REJECTION.label):
        settings = replace(settings, verifier=Verifier[name.upper()])
    elif name is not None:
        log.warning("verifier in the registry is %r; ignored", name)
    return settings


def changes_from_wire(change: admin_pb2.LiveSettings) -> dict[str, Any]:
    """The registry's form of the fields that are set. Raises ``InvalidRequest``."""
    changes: dict[str, Any] = {}
    if change.HasField("num_speculative_tokens"):
        if change.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise InvalidRequest(
                "settings.num_speculative_tokens", change.num_speculative_tokens, f"at most {MAX_SPECULATIVE_TOKENS}"
            )
        changes["num_speculative_tokens"] = change.num_speculative_tokens
    if change.HasField("verifier"):
        if change.verifier not in (Verifier.COUPLED, Verifier.REJECTION):
            raise InvalidRequest("settings.verifier", change.verifier, "rejection (2) or coupled (3)")
        changes["verifier"] = Verifier(change.verifier).label
    return changes

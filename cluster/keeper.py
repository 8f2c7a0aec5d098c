"""Restoring a part of a cluster for as long as the cluster runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from outrider.core.errors import OutriderError

log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]

BACK_OFF_S = (0.2, 15.0)  # first and longest wait before another try
HEALTHY_S = 30.0  # after that long without a death the waits start over


async def keep(what: str, watch: Work, restore: Work, report: Callable[[str], None]) -> None:
    """Restore something each time its watch reports a fault; wait longer after each try that fails. Ends by no error
    of ours: cancel it.

    Args:
        what: its name in the log.
        watch: returns or raises ``OutriderError`` when it is to be restored.
        restore: brings it back, or raises ``OutriderError``: then it is tried again.
        report: gets one line for each fault.
    """
    delay = BACK_OFF_S[0]
    while True:
        began = time.monotonic()
        try:
            await watch()
        except OutriderError as error:
            log.warning("%s failed: %s", what, error)
            report(f"{error}; starting again")
        if time.monotonic() - began > HEALTHY_S:
            delay = BACK_OFF_S[0]
        restored = False
        while not restored:
            await asyncio.sleep(delay)
            delay = min(2 * delay, BACK_OFF_S[1])
            try:
                await restore()
                restored = True
            except OutriderError as error:
                log.error("%s could not be started again: %s", what, error)

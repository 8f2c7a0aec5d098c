"""``outrider status``: what a cluster does, once or as a table that stays up to date."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from outrider.cluster.commands.common import Json
from outrider.cluster.commands.router_options import RouterOptions, with_router_options
from outrider.core.errors import OutriderError

Facts = dict[str, Any]

TIMEOUT_S = 10.0


@with_router_options
def status(
    *,
    router: RouterOptions,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="A table on the terminal that is kept up to date; Ctrl-C ends it.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", help="Seconds between two looks of --watch.", min=0.1, max=3600.0)
    ] = 1.0,
) -> None:
    """Show the target group and its ranks, drafts, queue and KV use."""
    from outrider.client import Client
    from outrider.cluster.describe import describe, merge_status

    if watch and as_json:
        raise typer.BadParameter("does not go with --json, which prints one object", param_hint="--watch")
    if watch and not sys.stdout.isatty():
        raise typer.BadParameter("needs a terminal; scripts take --json", param_hint="--watch")
    state = router.state()
    endpoint = router.endpoint(state)
    with Client(endpoint, timeout=TIMEOUT_S) as client:

        def look() -> Facts:
            return merge_status(state, endpoint.address, client.status())

        if watch:
            _watch(look, interval)
            return
        facts = look()
    print(json.dumps(facts) if as_json else describe(facts))


def _watch(look: Callable[[], Facts], interval_s: float) -> None:
    """Show what ``look`` finds until Ctrl-C or SIGTERM, which is how a watch ends: nothing to complain about.

    A router that does not answer at first is an error; one that goes away later may come back.
    """
    from rich.console import Console
    from rich.live import Live

    from outrider.cluster.commands.status_table import View, render

    view = View(look(), time.monotonic())
    with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                live.update(render(view), refresh=True)
                time.sleep(interval_s)
                try:
                    view = view.next(look(), time.monotonic())
                except OutriderError as error:
                    view = view.without_answer(str(error))
        except KeyboardInterrupt:
            live.update(render(view), refresh=True)

"""``outrider supervise``: target and drafts of a cluster on a Ray and a Redis that others run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def supervise(
    file: Annotated[Path, typer.Option("-f", "--file", help="Settings file.", show_default=False)],
    room_timeout: Annotated[
        float, typer.Option("--room-timeout", help="Seconds to wait until Ray has nodes for the target.", min=0.0)
    ] = 600.0,
) -> None:
    """Start and watch target and drafts, without a router, until SIGTERM. Needs redis.url and ray.address."""
    from outrider.cluster.supervisor import supervise as run

    raise typer.Exit(run(file, apart=True, room_timeout_s=room_timeout))

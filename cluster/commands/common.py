"""What commands share: options, which cluster is meant, and how they speak."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer

from outrider.core.errors import InvalidRequest, OutriderError

if TYPE_CHECKING:
    from outrider.cluster.state import ClusterState

File = Annotated[
    Optional[Path], typer.Option("-f", "--file", help="Settings file.", show_default=False)  # noqa: UP045
]
Cluster = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--cluster", help="Name of the cluster; not needed while one runs here.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

# Fields of a request that the command line calls otherwise.
_OPTIONS = {"text": "-p", "prompt": "-p", "content": "-p", "messages": "-p", "ebnf": "--grammar"}
_FIELD = re.compile(r"(?:.*\.)?(?P<name>\w+)(?P<part>(?:\[[^\]]*\])*)")


def running(cluster: str | None, file: Path | None) -> ClusterState:
    """The cluster that is meant. Raises ``ConfigError`` if it does not run."""
    from outrider.cluster.launch import choose_cluster
    from outrider.cluster.state import StateFolder

    return StateFolder(choose_cluster(cluster, file)).require_running()


def note(line: str) -> None:
    """Say something that is no answer."""
    print(line, file=sys.stderr, flush=True)


def fail(line: str, status: int) -> NoReturn:
    """End the command with one line that says why."""
    print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    raise typer.Exit(status)


def in_words_of_the_command(error: OutriderError) -> str:
    """Fields of a request as options of the command line."""
    match = _FIELD.fullmatch(error.field) if isinstance(error, InvalidRequest) else None
    if match is None or not isinstance(error, InvalidRequest):
        return str(error)
    option = _OPTIONS.get(match["name"], "--" + match["name"].replace("_", "-"))
    return f"{option}{match['part']} is {error.value!r}, but must be {error.limit}"

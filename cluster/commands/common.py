"""What commands share: options, where the router is, and how they speak."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer

from outrider.core.errors import ConfigError, InvalidRequest, OutriderError

if TYPE_CHECKING:
    from outrider.client import Endpoint
    from outrider.cluster.state import ClusterState

File = Annotated[
    Optional[Path], typer.Option("-f", "--file", help="Settings file.", show_default=False)  # noqa: UP045
]
Cluster = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--cluster", help="Name of the cluster; not needed while one runs here.", show_default=False),
]
Address = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--address",
        envvar="OUTRIDER_ADDRESS",
        help="HOST:PORT of a router, for one on another machine.",
        show_default=False,
    ),
]
_SECURITY = "TLS and keys"
CaCerts = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--ca-certs",
        envvar="OUTRIDER_CA_CERTS",
        help="CAs in PEM, one of which signed the router's certificate: the connection is one of TLS.",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
ApiKey = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--api-key",
        envvar="OUTRIDER_API_KEY",
        help="A key of the router. Other users see the command line, but not the variable.",
        metavar="KEY",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
ClientCert = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--client-cert",
        envvar="OUTRIDER_CLIENT_CERT",
        help="Certificate (chain) in PEM to show to the router.",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
ClientKey = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--client-key",
        envvar="OUTRIDER_CLIENT_KEY",
        help="Its key.",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
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


def router_of(state: ClusterState | None) -> str:
    """Where its router listens; empty where there is none."""
    return state.router_address if state is not None else ""


def endpoint(
    router: str, ca_certs: str | None, api_key: str | None, client_cert: str | None, client_key: str | None
) -> Endpoint:
    """A router and what it takes to be let in. Raises ``ConfigError`` where none is named."""
    # gRPC would tell of a handshake that fails in lines of its own.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from outrider.client import Endpoint

    if not router:
        raise ConfigError("the cluster has no router; see `outrider status`")
    return Endpoint.named(router, ca_certs=ca_certs, api_key=api_key, client_cert=client_cert, client_key=client_key)


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

"""The options by which a command reaches a router, once for all commands that do."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from outrider.cluster.commands.common import Cluster, File, running
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.client import Endpoint
    from outrider.cluster.state import ClusterState


_SECURITY = "TLS and keys"
Address = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--address",
        envvar="OUTRIDER_ADDRESS",
        help="HOST:PORT of a router, for one on another machine.",
        show_default=False,
    ),
]
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


@dataclass(frozen=True)
class RouterOptions:
    """Which router is meant and what it takes to be let in, as it was given; each field is an option."""

    file: File = None
    cluster: Cluster = None
    address: Address = None
    ca_certs: CaCerts = None
    api_key: ApiKey = None
    client_cert: ClientCert = None
    client_key: ClientKey = None

    def state(self) -> ClusterState | None:
        """The cluster on this machine that is meant; None where an address is given.

        Raises ``ConfigError`` if it does not run.
        """
        return None if self.address else running(self.cluster, self.file)

    def endpoint(self, state: ClusterState | None = None) -> Endpoint:
        """The router; ``state`` is what ``state()`` gave, where the caller has asked.

        Raises ``ConfigError`` if none is named and no cluster runs, or it has no router.
        """
        # gRPC would tell of a handshake that fails in lines of its own.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from outrider.client import Endpoint

        state = state or self.state()
        address = self.address or (state.router_address if state is not None else "")
        if not address:
            raise ConfigError("the cluster has no router; see `outrider status`")
        return Endpoint.named(
            address,
            ca_certs=self.ca_certs,
            api_key=self.api_key,
            client_cert=self.client_cert,
            client_key=self.client_key,
        )


def with_router_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of ``RouterOptions`` in the place of its parameter ``router``, which gets them."""
    own = inspect.signature(RouterOptions, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name == "router":
            parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own.values()]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        router = RouterOptions(**{name: options.pop(name) for name in own})
        command(**options, router=router)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper

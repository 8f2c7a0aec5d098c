"""TLS, keys and certificates on the command line: a server that lets in, listens, and has nothing to say."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer

from outrider.cluster import cli
from outrider_certificates import Files

COMMANDS = {
    "generate": ["-p", "x"],
    "status": [],
    "profile": [],
    "bench": ["--no-costs", "-w", "chat", "-n", "1"],
    "check-exactness": ["--model", "."],
}
KEY = "s3cret"


class Door(grpc.GenericRpcHandler):
    """Asks for the key, whatever is called."""

    def __init__(self) -> None:
        self.admitted: list[str] = []

    def service(self, details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")

        def answer(_: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            if given != f"Bearer {KEY}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")
            self.admitted.append(details.method)
            context.abort(grpc.StatusCode.INTERNAL, "come in")
            yield b""

        return grpc.unary_stream_rpc_method_handler(answer)


@dataclass
class Router:
    """A door that wants certificates of its own CA, and the options that open it."""

    door: Door
    address: str
    options: dict[str, str]
    run: Callable[..., str] = field(repr=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def router(files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Router]:
    door = Door()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(door,))
    pair = (files.key.read_bytes(), files.certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], files.ca_certs.read_bytes(), require_client_auth=True)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()

    def run(command: str, *args: str) -> str:
        """Its error line."""
        words = ["outrider", command, *COMMANDS[command], "--address", address, *args]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert KEY not in err
        return err

    handler = signal.getsignal(signal.SIGTERM)
    options = {
        "--ca-certs": str(files.ca_certs),
        "--api-key": KEY,
        "--client-cert": str(files.certificate),
        "--client-key": str(files.key),
    }
    yield Router(door, address, options, run)
    signal.signal(signal.SIGTERM, handler)
    server.stop(None).wait(10)


def words(options: dict[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_calls_a_router_is_let_in(router: Router, command: str) -> None:
    assert "come in" in router.run(command, *words(router.options))
    assert len(router.door.admitted) == 1


def test_every_command_that_calls_a_router_describes_it_alike(router: Router) -> None:
    group: Any = typer.main.get_command(cli.app)
    options = {
        name: {word: parameter for parameter in command.params for word in parameter.opts}
        for name, command in group.commands.items()
    }
    assert {name for name, known in options.items() if "--address" in known} == set(COMMANDS)
    for option in ("--file", "--cluster", "--address", *router.options):
        shown = {
            (known.name, tuple(known.opts), known.help, known.envvar, known.metavar, known.rich_help_panel)
            for known in (options[name][option] for name in COMMANDS)
        }
        assert len(shown) == 1, option
        assert all(known for known in next(iter(shown))[:3])


def test_variables_stand_for_options(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    for option, value in router.options.items():
        monkeypatch.setenv("OUTRIDER_" + option.removeprefix("--").replace("-", "_").upper(), value)
    assert "come in" in router.run("generate")
    assert "does not know the API key that was given" in router.run("generate", "--api-key", "other")


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        (("--api-key",), "wants an API key: give api_key (--api-key)"),
        (("--client-cert", "--client-key"), "ended the TLS handshake: where it wants clients to show certificates"),
        (("--client-key",), "client_cert and client_key need each other"),
        (("--ca-certs",), "client_cert is of use with TLS only: give ca_certs (--ca-certs"),
        (("--ca-certs", "--client-cert", "--client-key"), "speaks TLS: give ca_certs (--ca-certs"),
    ],
)
def test_what_is_missing_is_named(router: Router, missing: tuple[str, ...], line: str) -> None:
    given = {option: value for option, value in router.options.items() if option not in missing}
    for command in ("generate", "status", "profile"):
        assert line in router.run(command, *words(given))
    assert router.door.admitted == []


def test_a_ca_that_knows_nothing_of_the_router_is_named(router: Router, tmp_path: Path) -> None:
    other = str(Files(tmp_path / "other").ca_certs)
    assert f"{other} does not vouch for" in router.run("status", *words({**router.options, "--ca-certs": other}))

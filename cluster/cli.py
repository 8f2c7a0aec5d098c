"""The command ``outrider``. Ray, torch and Redis are imported by the processes that it starts, not here."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer

from outrider.core.errors import ConfigError, InvalidRequest, OutriderError

if TYPE_CHECKING:
    from outrider.cluster.state import ClusterState

app = typer.Typer(
    name="outrider",
    help="Serve large language models with speculative decoding across machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def up(
    file: File = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the cluster is ready; it goes on.")] = False,
) -> None:
    """Start a cluster: Redis, Ray, target, drafts, router. Without -f: the tiny pair of the repository."""
    from outrider.cluster import launch

    settings = file if file is not None else launch.default_settings()
    if detach:
        address = launch.start_detached(settings, _note)
        _note(f"ready: the router listens on {address}; `outrider down` stops the cluster")
        return
    from outrider.cluster.supervisor import supervise

    raise typer.Exit(supervise(settings))


@app.command()
def down(file: File = None, cluster: Cluster = None) -> None:
    """Stop a cluster and all of its processes. Stopping one that does not run is no error."""
    from outrider.cluster import launch
    from outrider.cluster.state import running_clusters

    if cluster is None and file is None and not running_clusters():
        _note("no cluster is running")
        return
    name = launch.choose_cluster(cluster, file)
    _note(f"stopped the cluster {name!r}" if launch.stop(name) else f"the cluster {name!r} is not running")


@app.command()
def status(file: File = None, cluster: Cluster = None, address: Address = None, as_json: Json = False) -> None:
    """Show the target group and its ranks, drafts, queue and KV use."""
    from outrider.client import Client
    from outrider.cluster.describe import describe, merge_status

    state = None if address else _running(cluster, file)
    router = address or _router_of(state)
    with Client(router, timeout=10.0) as client:
        facts = merge_status(state, router, client.status())
    print(json.dumps(facts) if as_json else describe(facts))


@app.command()
def generate(
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("-p", "--prompt", help="The prompt; else standard input, as it is.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Output tokens wanted. Default: as many as the context holds.", show_default=False),
    ] = None,
    temperature: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="0 is greedy. Default: 1.", show_default=False),
    ] = None,
    top_k: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Sample from that many most likely tokens. Default: all.", show_default=False),
    ] = None,
    top_p: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Sample from the most likely tokens of that mass. Default: 1.", show_default=False),
    ] = None,
    stop: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="String that ends the text; may be given several times.", show_default=False),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Source of all random numbers. Default: the server picks one.", show_default=False),
    ] = None,
    num_speculative_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Proposed tokens for each round; 0 turns speculation off.", show_default=False),
    ] = None,
    verifier: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="greedy, rejection or coupled.", show_default=False),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")] = False,
    file: File = None,
    cluster: Cluster = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt; the text is printed as it comes."""
    from outrider.client import Client

    text = prompt if prompt is not None else _standard_input()
    router = address or _router_of(_running(cluster, file))
    with (
        Client(router) as client,
        client.stream(
            [{"role": "user", "content": text}] if chat else text,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=stop,
            seed=seed,
            num_speculative_tokens=num_speculative_tokens,
            verifier=verifier,
        ) as stream,
    ):
        written = ""
        for piece in stream:
            written = piece
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        completion = stream.completion
    if as_json:
        print(json.dumps(completion.to_dict()))
    elif not written.endswith("\n"):
        print()
    if completion.finish_reason == "abort":
        _fail(f"the request {completion.request_id} was aborted", 1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look whether this machine has everything that a cluster needs."""
    from outrider.cluster.doctor import examine

    findings = examine()
    missing = [finding for finding in findings if finding.needed and not finding.ok]
    if as_json:
        print(json.dumps({"ok": not missing, "checks": [finding.as_json() for finding in findings]}))
    else:
        for finding in findings:
            mark = "ok" if finding.ok else ("MISSING" if finding.needed else "note")
            advice = "" if finding.ok else f"  -> {finding.advice}"
            print(f"{mark:8}{finding.name:15}{finding.found}{advice}")
    if missing:
        _fail("missing: " + ", ".join(finding.name for finding in missing) + "; see above for what to do", 1)


def _running(cluster: str | None, file: Path | None) -> ClusterState:
    from outrider.cluster.launch import choose_cluster
    from outrider.cluster.state import StateFolder

    return StateFolder(choose_cluster(cluster, file)).require_running()


def _router_of(state: ClusterState | None) -> str:
    return state.router_address if state is not None else ""


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError("give a prompt with -p TEXT or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input is not UTF-8 ({error.reason})") from error


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(line: str, status: int) -> NoReturn:
    print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    raise typer.Exit(status)


def main() -> None:
    """Entry point: exit code 0 only on success, errors as one line on stderr, 2 for a wrong command line."""
    # Told to stop, a command ends as after Ctrl-C: what it started is stopped too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        try:
            status = typer.main.get_command(app).main(prog_name="outrider", standalone_mode=False)
        except usage_error as error:
            _fail(f"{error.format_message()} (see `outrider --help`)", 2)
        except OutriderError as error:
            _fail(_in_words_of_the_command(error), 1)
        except (KeyboardInterrupt, typer.Abort):
            _fail("interrupted", 130)
        except BrokenPipeError:
            # Whoever read our output went away, as `head` does. Nothing more can be written, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except ImportError as error:
            _fail(
                f"{error}: install what is missing, for a machine that runs clusters `pip install 'outrider[local]'`", 1
            )
    except typer.Exit as end:
        status = end.exit_code
    sys.exit(status or 0)


def _in_words_of_the_command(error: OutriderError) -> str:
    """Fields of a request as options of the command line."""
    if not isinstance(error, InvalidRequest):
        return str(error)
    field = error.field.partition("[")[0].rpartition(".")[2]
    option = "-p" if field in ("text", "prompt", "content") else "--" + field.replace("_", "-")
    return f"{option} is {error.value!r}, but must be {error.limit}"


if __name__ == "__main__":
    main()

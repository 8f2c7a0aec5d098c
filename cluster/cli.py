"""The command ``outrider``. Ray, torch and Redis are imported by the processes that it starts, not here."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Annotated, Any

import typer

from outrider.cluster.commands.bench import bench
from outrider.cluster.commands.check_exactness import check_exactness
from outrider.cluster.commands.common import Cluster, File, Json, fail, in_words_of_the_command, note
from outrider.cluster.commands.generate import generate
from outrider.cluster.commands.profile import profile
from outrider.cluster.commands.router import router
from outrider.cluster.commands.status import status
from outrider.cluster.commands.supervise import supervise
from outrider.core.errors import OutriderError

app = typer.Typer(
    name="outrider",
    help="Serve large language models with speculative decoding across machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def up(
    file: File = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the cluster is ready; it goes on.")] = False,
) -> None:
    """Start a cluster: Redis, Ray, target, drafts, router. Without -f: the tiny pair of the repository."""
    from outrider.cluster import launch

    settings = file if file is not None else launch.default_settings()
    if detach:
        address = launch.start_detached(settings, note)
        note(f"ready: the router listens on {address}; `outrider down` stops the cluster")
        return
    from outrider.cluster.supervisor import supervise

    raise typer.Exit(supervise(settings))


@app.command()
def down(file: File = None, cluster: Cluster = None) -> None:
    """Stop a cluster and all of its processes. Stopping one that does not run is no error."""
    from outrider.cluster import launch
    from outrider.cluster.state import running_clusters

    if cluster is None and file is None and not running_clusters():
        note("no cluster is running")
        return
    name = launch.choose_cluster(cluster, file)
    note(f"stopped the cluster {name!r}" if launch.stop(name) else f"the cluster {name!r} is not running")


app.command("status")(status)
app.command("generate")(generate)
app.command("check-exactness")(check_exactness)
app.command("profile")(profile)
app.command("bench")(bench)
app.command("router")(router)
app.command("supervise")(supervise)


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
        fail("missing: " + ", ".join(finding.name for finding in missing) + "; see above for what to do", 1)


def main() -> None:
    """Entry point: exit code 0 only on success, errors as one line on stderr, 2 for a wrong command line."""
    # Told to stop, a command ends as after Ctrl-C: what it started is stopped too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        try:
            status = typer.main.get_command(app).main(prog_name="outrider", standalone_mode=False)
        except usage_error as error:
            fail(f"{error.format_message()} (see `outrider --help`)", 2)
        except OutriderError as error:
            fail(in_words_of_the_command(error), 1)
        except (KeyboardInterrupt, typer.Abort):
            fail("interrupted", 130)
        except BrokenPipeError:
            # Whoever read our output went away, as `head` does. Nothing more can be written, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except ImportError as error:
            fail(
                f"{error}: install what is missing, for a machine that runs clusters `pip install 'outrider[local]'`", 1
            )
    except typer.Exit as end:
        status = end.exit_code
    sys.exit(status or 0)


if __name__ == "__main__":
    main()

"""``outrider bench``: load for a running server, plain decoding beside speculation."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cluster.commands.common import fail, note
from outrider.cluster.commands.router_options import RouterOptions, with_router_options
from outrider.core.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from outrider.bench.peers import Peers
    from outrider.bench.run import BenchRun, Tell
    from outrider.client import Endpoint

LOAD = "Load"
REQUESTS = "Requests"
OUTPUT = "Output"
OPEN_SLOTS = 16  # of peers where requests arrive as they like
PEERS = "Other servers, with the same prompts in the same run"


def _option(*names: str, help: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


@with_router_options
def bench(
    *,
    workload: Annotated[
        list[str] | None,
        _option(
            "-w",
            "--workload",
            help="code, chat, maths, copy, retrieval, json, writing, or a file of JSON lines (*.jsonl); may be given "
            "several times. Default: all seven.",
            panel=LOAD,
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, _option("-n", "--requests", help="Of each workload and arm.", panel=LOAD, min=1)] = 16,
    concurrency: Annotated[
        int, _option("-c", "--concurrency", help="Requests at once (closed loop).", panel=LOAD, min=1)
    ] = 1,
    rate: Annotated[
        float | None,
        _option(
            "--rate",
            help="Requests a second that arrive by a Poisson process, however many run (open loop), instead.",
            panel=LOAD,
            metavar="FLOAT",
            show_default=False,
        ),
    ] = None,
    blocks: Annotated[
        int, _option("--blocks", help="Turns of each arm in each workload.", panel=LOAD, min=1, max=1000)
    ] = 4,
    seed: Annotated[int, _option("--seed", help="Of order, arrivals and requests.", panel=LOAD, min=0)] = 0,
    deadline: Annotated[float, _option("--deadline", help="Seconds that the run may take.", panel=LOAD, min=1)] = 3600,
    max_tokens: Annotated[
        int | None,
        _option("--max-tokens", help="Default: each item's own.", panel=REQUESTS, min=1, show_default=False),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        _option(
            "--num-speculative-tokens",
            help="Proposed tokens for each round of the speculative arm. Default: the server's.",
            panel=REQUESTS,
            min=1,
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float, _option("--temperature", help="Where an item names none; 0 is greedy.", panel=REQUESTS, min=0)
    ] = 0.0,
    verifier: Annotated[
        str | None,
        _option("--verifier", help="rejection or coupled, at temperatures above 0.", panel=REQUESTS, metavar="TEXT"),
    ] = None,
    ignore_eos: Annotated[
        bool, _option("--ignore-eos", help="Every answer has as many tokens as it may.", panel=REQUESTS)
    ] = False,
    tag_prompts: Annotated[
        bool,
        _option(
            "--tag-prompts/--same-prompts",
            help="Begin each prompt with a tag of its own, so that no arm finds another's in the prefix cache.",
            panel=REQUESTS,
        ),
    ] = True,
    json_file: Annotated[
        Path | None,
        _option("--json", help="Write everything here, each request too; - is standard output.", panel=OUTPUT),
    ] = None,
    plots: Annotated[
        Path | None, _option("--plots", help="Write pictures (PNG) here.", panel=OUTPUT, metavar="FOLDER")
    ] = None,
    costs: Annotated[
        bool,
        _option("--costs/--no-costs", help="Profile passes, draft and hop first (`outrider profile`).", panel=OUTPUT),
    ] = True,
    peer: Annotated[
        list[str] | None,
        _option(
            "--peer",
            help="llama.cpp, vllm or transformers; NAME=PATH names llama-server, or the Python that has the package.",
            panel=PEERS,
            metavar="NAME[=PATH]",
            show_default=False,
        ),
    ] = None,
    peer_model: Annotated[
        Path | None, _option("--peer-model", help="Model folder for vllm and transformers.", panel=PEERS)
    ] = None,
    peer_gguf: Annotated[Path | None, _option("--peer-gguf", help="Model file for llama.cpp.", panel=PEERS)] = None,
    peer_draft_model: Annotated[
        Path | None, _option("--peer-draft-model", help="Draft folder for vllm and transformers.", panel=PEERS)
    ] = None,
    peer_draft_gguf: Annotated[
        Path | None, _option("--peer-draft-gguf", help="Draft file for llama.cpp.", panel=PEERS)
    ] = None,
    peer_dtype: Annotated[str, _option("--peer-dtype", help="Precision of vllm and transformers.", panel=PEERS)] = (
        "bfloat16"
    ),
    peer_threads: Annotated[int, _option("--peer-threads", help="Threads of each.", panel=PEERS, min=1)] = 2,
    router: RouterOptions,
) -> None:
    """Put load on a running server: plain decoding and speculation in turns, in one run."""
    from outrider.bench.peers import Peers, PeerSettings
    from outrider.bench.peers.protocols import Asking
    from outrider.bench.run import BenchSettings
    from outrider.bench.run import run as run_bench
    from outrider.bench.summary import summarise
    from outrider.bench.workloads import NAMES, load

    if rate is not None and rate <= 0:
        raise typer.BadParameter("a number above 0 is wanted.", param_hint="'--rate'")
    options: dict[str, Any] = {"temperature": temperature, "ignore_eos": ignore_eos or None}
    if verifier is not None:
        options["verifier"] = verifier
    settings = BenchSettings(
        workloads=tuple(load(name) for name in dict.fromkeys(workload or NAMES)),
        requests=requests,
        rate=rate,
        concurrency=concurrency,
        blocks=blocks,
        max_tokens=max_tokens,
        num_speculative_tokens=num_speculative_tokens,
        options={name: value for name, value in options.items() if value is not None},
        seed=seed,
        deadline_s=deadline,
        plain_prompts=bool(peer),
        tag_prompts=tag_prompts,
    )
    _check_outputs(json_file, plots)
    asking = Asking(temperature=temperature, ignore_eos=ignore_eos)
    peer_settings = PeerSettings.parse(
        peer or (),
        peer_model,
        peer_gguf,
        dtype=peer_dtype,
        threads=peer_threads,
        slots=concurrency if rate is None else max(concurrency, OPEN_SLOTS),
        asking=asking,
        draft_model=peer_draft_model,
        draft_gguf=peer_draft_gguf,
        num_draft_tokens=num_speculative_tokens or 4,
    )
    peers = Peers(peer_settings, note)
    endpoint = router.endpoint()

    async def measure(tell: Tell, peers: Peers) -> tuple[BenchRun, dict[str, Any] | None]:
        facts = await _costs(endpoint, num_speculative_tokens, tell) if costs else None
        async with peers as arms:
            return await run_bench(endpoint, settings, tell, arms), facts

    with _bar() as tell:
        seen, facts = asyncio.run(measure(tell, peers))
    summary = {**summarise(seen), "costs": facts}
    _write(seen, summary, json_file, plots)
    if not seen.complete:
        fail(f"the deadline of {deadline:g} s passed before every request was sent", 1)


def _write(seen: BenchRun, summary: dict[str, Any], json_file: Path | None, plots: Path | None) -> None:
    from rich.console import Console

    from outrider.bench.plots import draw
    from outrider.bench.table import show

    is_piped = json_file is not None and str(json_file) == "-"
    console = Console(stderr=is_piped, width=None if Console().is_terminal else 200)
    show(summary, console)
    facts = summary["costs"]
    if facts is not None:
        passes = ", ".join(f"{rows} rows {value:.2f}" for rows, value in facts["target_ms"].items())
        draft = "none" if facts["draft_ms"] is None else f"{facts['draft_ms']:.2f}"
        hop = facts["overhead_ms"]
        console.print(
            f"costs in ms: pass over {passes}; drafted token {draft}; hop {'none' if hop is None else f'{hop:.2f}'}",
            highlight=False,
        )
    if json_file is not None:
        text = json.dumps({**summary, "requests": [record.to_dict(seen.origin) for record in seen.records]})
        if is_piped:
            print(text)
        else:
            json_file.write_text(text + "\n", encoding="utf-8")
            note(f"wrote {json_file}")
    if plots is not None:
        for path in draw(seen, summary, plots):
            note(f"wrote {path}")


def _check_outputs(json_file: Path | None, plots: Path | None) -> None:
    """Before hours of load, not after. Raises ``ConfigError``."""
    import importlib.util

    if json_file is not None and str(json_file) != "-":
        try:
            json_file.touch()
        except OSError as error:
            raise ConfigError(f"cannot write {json_file}: {error.strerror}") from error
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib: pip install 'outrider[bench]'")


async def _costs(router: Endpoint, k: int | None, tell: Tell) -> dict[str, Any] | None:
    """A short profile; None, and a note, where the router cannot make one."""
    from outrider.cluster.commands.profile import as_facts, measure
    from outrider.v1 import admin_pb2

    rows = sorted({1, (k or 4) + 1})
    request = admin_pb2.ProfileRequest(rows=rows, contexts=[128], num_runs=5, num_proposals=20)
    if k is None:
        request.rows[:] = [1, 3, 5, 9]
    try:
        return as_facts(await measure(router, request, 300.0, tell))
    except OutriderError as error:
        note(f"no costs: {error}")
        return None


@contextlib.contextmanager
def _bar() -> Iterator[Tell]:
    """Shown where standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=None)

        def tell(words: str, done: int, total: int) -> None:
            bars.update(bar, description=words, completed=done, total=total)

        yield tell

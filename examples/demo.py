"""Outrider in a minute: starts the tiny pair on this machine and puts requests through all of its processes.

Run it with ``make demo``. A router, a target on two ranks and a draft worker start as processes of their own; requests
go through them under each of the three verifiers; a table shows what speculation did; everything is stopped again, and
the demo looks for processes that are left. The exit code is 0 only if all of that went well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider.client import Client, Completion, OutriderError, Prompt
from outrider.cluster.config import load_config
from outrider.cluster.state import StateFolder

SETTINGS = Path(__file__).resolve().parent / "tiny.yaml"
# What is shown, and what is sent: a text to go on with, or a chat.
PROMPTS: tuple[tuple[str, Prompt], ...] = (
    ("The with statement", "The with statement"),
    ("json.dumps\n\n", "json.dumps\n\n"),
    ("What is a dictionary?\n", [{"role": "user", "content": "What is a dictionary?"}]),
)
MAX_TOKENS = 64
TEMPERATURE = 0.8
SEED = 7
START_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 90.0
REQUEST_TIMEOUT_S = 120.0

console = Console(highlight=False, emoji=False, soft_wrap=True)
if not console.is_terminal:
    console.width = 100


@dataclass(frozen=True)
class Way:
    """One way to serve the prompts."""

    name: str
    temperature: float
    verifier: str | None = None
    # None leaves it to the settings file.
    num_speculative_tokens: int | None = None


PLAIN = Way("no speculation", TEMPERATURE, num_speculative_tokens=0)
SPECULATIVE = (
    Way("greedy", 0.0),
    Way("rejection", TEMPERATURE, "rejection"),
    Way("coupled", TEMPERATURE, "coupled"),
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as folder:
        # A state folder of its own, so that the demo runs beside other clusters. Every process that it starts inherits
        # the variable, which is how the last step knows those that are left.
        os.environ["OUTRIDER_STATE_DIR"] = folder
        problems: list[str] = []
        try:
            with cluster() as address, Client(address, timeout=REQUEST_TIMEOUT_S) as client:
                problems += compare_ways(client)
                problems += compare_block_sizes(client)
                heading("outrider status")
                problems += [] if outrider("status", timeout=30) == 0 else ["outrider status failed"]
        except OutriderError as error:
            problems.append(str(error))
        except KeyboardInterrupt:
            problems.append("interrupted")
        left = left_processes(folder)
        problems += [f"a process is left: {line}" for line in left]
        if not left:
            console.print("No process is left behind.")
    for problem in problems:
        console.print(f"demo: {problem}", style="red", markup=False)
    return 1 if problems else 0


@contextmanager
def cluster() -> Iterator[str]:
    """The running cluster's router address; stops the cluster at the end, whatever happens."""
    heading("outrider up --detach -f examples/tiny.yaml")
    begun = time.monotonic()
    try:
        if outrider("up", "--detach", "-f", str(SETTINGS), timeout=START_TIMEOUT_S) != 0:
            raise OutriderError("the cluster did not start")
        console.print(f"up after {time.monotonic() - begun:.0f} s")
        yield StateFolder(load_config(SETTINGS).cluster).require_running().router_address
    finally:
        heading("outrider down")
        outrider("down", timeout=STOP_TIMEOUT_S)


def compare_ways(client: Client) -> list[str]:
    """Serves the prompts in each way, streams the texts, prints the table. Returns what is not as it should be."""
    rows: list[tuple[Way, list[Completion]]] = []
    for way in (PLAIN, *SPECULATIVE):
        heading(f"{way.name}, temperature {way.temperature:g}")
        rows.append((way, [stream(client, shown, prompt, way) for shown, prompt in PROMPTS]))

    table = Table(title=f"What speculation did, over {len(PROMPTS)} requests of at most {MAX_TOKENS} tokens")
    table.add_column("verifier")
    for column in (
        "tokens",
        "target calls",
        "tokens per call",
        "proposed tokens accepted",
        "probability bytes per token",
    ):
        table.add_column(column, justify="right")
    problems = []
    for way, completions in rows:
        tokens = sum(completion.usage.completion_tokens for completion in completions)
        done = [completion.speculation for completion in completions]
        calls = sum(speculation.target_calls for speculation in done)
        proposed = sum(speculation.num_draft_tokens for speculation in done)
        accepted = sum(speculation.num_accepted_tokens for speculation in done)
        table.add_row(
            way.name,
            str(tokens),
            str(calls),
            f"{tokens / calls:.2f}" if calls else "-",
            f"{accepted / proposed:.0%} of {proposed}" if proposed else "-",
            f"{sum(speculation.probability_bytes for speculation in done) / tokens:.0f}" if tokens else "-",
        )
        if way is not PLAIN and not accepted:
            problems.append(f"under {way.name} no proposal was accepted")
    console.print()
    console.print(table)
    console.print(
        "Under rejection the draft's probabilities travel with its proposals. Under coupled verification draft and\n"
        "target share their random numbers instead, and nothing but tokens travels."
    )
    return problems


def compare_block_sizes(client: Client) -> list[str]:
    """Coupled text must depend on the seed alone: not on how many tokens are proposed at a time."""
    heading("coupled, one seed, with k = 0 and k = 4")
    texts = []
    for k in (0, 4):
        completion = client.generate(
            PROMPTS[0][1],
            max_tokens=MAX_TOKENS,
            temperature=TEMPERATURE,
            seed=SEED + 1,
            verifier="coupled",
            num_speculative_tokens=k,
        )
        calls = completion.speculation.target_calls
        console.print(f"k = {k}: {completion.usage.completion_tokens} tokens in {calls} target calls")
        texts.append(completion.token_ids)
    if texts[0] != texts[1]:
        return [f"the text of one seed depends on k: {texts[0]} and {texts[1]}"]
    console.print("The same text, token for token.")
    return []


def stream(client: Client, shown: str, prompt: Prompt, way: Way) -> Completion:
    """One request, printed as it comes."""
    console.print(shown, style="bold", end="", markup=False)
    with client.stream(
        prompt,
        max_tokens=MAX_TOKENS,
        temperature=way.temperature,
        seed=SEED,
        verifier=way.verifier,
        num_speculative_tokens=way.num_speculative_tokens,
    ) as pieces:
        for piece in pieces:
            console.print(piece, end="", markup=False)
    console.print("\n")
    return pieces.completion


def outrider(*words: str, timeout: float) -> int:
    """Run the command line of this environment; its exit code."""
    command = Path(sysconfig.get_path("scripts")) / "outrider"
    try:
        return subprocess.run([command, *words], timeout=timeout, stdin=subprocess.DEVNULL, check=False).returncode
    except subprocess.TimeoutExpired:
        console.print(f"outrider {words[0]} did not end within {timeout:g} s", style="red")
        return 124


def left_processes(folder: str) -> list[str]:
    """Ends and names the processes that inherited our state folder and outlived ``outrider down``."""
    deadline = time.monotonic() + 10.0
    while (found := _heirs(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)  # some are still on their way out
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid} {line}" for pid, line in found.items()]


def _heirs(folder: str) -> dict[int, str]:
    mark = f"OUTRIDER_STATE_DIR={folder}".encode()
    heirs = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                heirs[int(entry.name)] = command[:100]
        except OSError:
            continue  # it ended, or is another user's
    return heirs


def heading(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


if __name__ == "__main__":
    sys.exit(main())

"""What the scripts share: options, progress, and how they end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from outrider.client import AsyncClient, OutriderError

NOT_MEASURED = 3  # exit code where nothing can be said

Tell = Callable[[str], None]
Work = Callable[[AsyncClient, Tell], Awaitable[dict[str, Any]]]


def add_options(parser: argparse.ArgumentParser, deadline_s: float) -> None:
    """Those that every measurement takes."""
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="router; `outrider up` prints it. Default: the variable OUTRIDER_ADDRESS"
    )
    parser.add_argument(
        "--deadline", type=above_zero, default=deadline_s, metavar="SECONDS", help="of the whole run (%(default)g)"
    )


def above_zero(text: str) -> float:
    """A type for argparse."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def from_one(text: str) -> int:
    """A type for argparse."""
    return _whole(text, 1)


def from_zero(text: str) -> int:
    """A type for argparse."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= least:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")


def measured(args: argparse.Namespace, work: Work) -> dict[str, Any]:
    """What ``work`` returns, printed as one JSON object too. Where it fails, ends the process with one line."""

    async def run() -> dict[str, Any]:
        async with asyncio.timeout(args.deadline), AsyncClient(args.address, timeout=args.deadline) as client:
            return await work(client, _tell)

    try:
        facts = asyncio.run(run())
    except TimeoutError:
        _fail(f"not done within {args.deadline:g} s; see --deadline")
    except OutriderError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted")
    _tell("")
    print(json.dumps(facts), flush=True)
    return facts


def _tell(line: str) -> None:
    """In one line where standard error is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)


def _fail(line: str) -> NoReturn:
    _tell("")
    print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    raise SystemExit(NOT_MEASURED)

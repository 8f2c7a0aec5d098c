"""Measure what `outrider bench` has no load for, on a running server; every mode prints one JSON object.

    python scripts/measure_serving.py prefix --address HOST:PORT [--prefix-tokens 1000] [--pairs 5]
    python scripts/measure_serving.py entering --address HOST:PORT [--streams 4] [--prompt-tokens 2000] [--rounds 3]
    python scripts/measure_serving.py oversubscribed --address HOST:PORT [--factor 4]
    python scripts/measure_serving.py batch --address HOST:PORT [--streams 8] [--blocks 3]

`MODE --help` says what each does. All decode greedily, plainly and with speculation (-k, default: the server's setting;
0 leaves it out). Prompts are cut from the code workload, so their lengths are about those asked for; the exact ones are
in the JSON. --seed gives other texts: a server that has seen a text has it in its prefix cache, so take another seed
for a second run on the same cluster. Ratios of one run can be compared, those of two runs hardly.

Exit code 0 if all was measured, 1 if an oversubscribed server lost or changed a text, 3 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from outrider.bench.measures.batch import measure_batch
from outrider.bench.measures.command import Tell, above_zero, add_options, from_one, from_zero, measured
from outrider.bench.measures.entering import measure_entering
from outrider.bench.measures.oversubscribed import is_sound, measure_oversubscribed
from outrider.bench.measures.prefix import measure_prefix
from outrider.client import AsyncClient

PREFIX = """Time to the first token of a prompt that was never seen, and of a second request that goes on after the
same text: pairs with different texts, and the ratio of the second's time to the first's. A first pair warms up."""
ENTERING = """Gaps of running streams before and while a long prompt enters: message_gap is from one message to the
next, token_gap the same divided by the tokens that ended it (docs/benchmarks.md). All rounds together, and the ratio of
each round. Streams that reach the end of the context are followed by new ones; gaps in which those enter do not
count."""
OVERSUBSCRIBED = """As many requests at once as need --factor times the KV blocks of the group; then each of them alone.
Each must end at its length, and with the same tokens. The group's own number of blocks may make that long: start the
cluster with few of them, such as `target: {num_kv_blocks: 32}` in its settings. With the defaults here a request grows
from 4 blocks of 16 positions to 8, and 16 of them need four times 32."""
BATCH = """Tokens a second of one stream and of several, plain and with speculation, in turns on the same prompts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    _prefix(modes)
    _entering(modes)
    _oversubscribed(modes)
    _batch(modes)
    args = parser.parse_args()
    names = [name for name in vars(args) if name not in ("mode", "measure", "address", "deadline")]

    async def work(client: AsyncClient, tell: Tell) -> dict[str, Any]:
        facts: dict[str, Any] = await args.measure(client, tell, **{name: getattr(args, name) for name in names})
        return facts

    facts = measured(args, work)
    return 0 if args.mode != "oversubscribed" or is_sound(facts) else 1


def _mode(modes: Any, name: str, text: str, measure: Any) -> argparse.ArgumentParser:
    mode: argparse.ArgumentParser = modes.add_parser(name, description=text, help=text.partition(":")[0].split(".")[0])
    mode.set_defaults(measure=measure)
    add_options(mode, 1800.0)
    mode.add_argument(
        "-k", type=from_zero, help="proposed tokens; 0: plain decoding only. Default: the server's setting"
    )
    mode.add_argument("--seed", type=from_zero, default=0, help="of the texts (0)")
    return mode


def _number(mode: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    mode.add_argument(name, type=from_one, default=default, help=f"{text} (%(default)s)")


def _prefix(modes: Any) -> None:
    mode = _mode(modes, "prefix", PREFIX, measure_prefix)
    _number(mode, "--prefix-tokens", 1000, "tokens that a pair shares")
    _number(mode, "--more-tokens", 16, "tokens of the second request after them")
    _number(mode, "--pairs", 5, "that are measured")


def _entering(modes: Any) -> None:
    mode = _mode(modes, "entering", ENTERING, measure_entering)
    _number(mode, "--streams", 4, "that run")
    _number(mode, "--prompt-tokens", 2000, "of the prompt that enters")
    _number(mode, "--rounds", 3, "in which one enters")
    _number(mode, "--quiet-messages", 40, "of each stream before it, in each round")


def _oversubscribed(modes: Any) -> None:
    mode = _mode(modes, "oversubscribed", OVERSUBSCRIBED, measure_oversubscribed)
    mode.add_argument("--factor", type=above_zero, default=4.0, help="blocks wanted over blocks there (%(default)g)")
    _number(mode, "--prompt-tokens", 64, "of each request")
    _number(mode, "--max-tokens", 64, "of each answer")
    _number(mode, "--block-size", 16, "positions in a block: target.block_size of the settings")


def _batch(modes: Any) -> None:
    mode = _mode(modes, "batch", BATCH, measure_batch)
    mode.add_argument("-w", "--workload", default="code", help="of `outrider bench`, or a file of JSON lines")
    _number(mode, "--streams", 8, "at once")
    _number(mode, "--max-tokens", 64, "of each answer")
    _number(mode, "--blocks", 3, "turns of each arm")


if __name__ == "__main__":
    sys.exit(main())

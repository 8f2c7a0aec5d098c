"""Measure what a forward pass over several rows costs, against one row, on one rank.

    python scripts/measure_rows.py MODEL_DIR [--dtype float32] [--threads 1] [--context 128] [--runs 7]

Verifying ``k`` proposed tokens is a pass over ``k + 1`` rows: speculation pays only where that costs about as much as
a pass over one. The runs of the different sizes take turns, so that a drift of the machine's speed falls on all alike;
the median of each is printed, head included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from outrider.cluster.config import EngineConfig
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.parallel import Parallel

ROW_COUNTS = (1, 2, 3, 5, 9, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128, help="positions before the first row")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    length = args.context + max(ROW_COUNTS)
    config = EngineConfig.model_validate(
        {
            "model": args.model_dir,
            "dtype": args.dtype,
            "num_threads": args.threads,
            "max_model_len": length,
            "num_kv_blocks": -(-length // 16),
        }
    )
    engine = Engine(config, Parallel.single())
    table = list(range(engine.num_blocks))
    tokens = [(7 * position + 1) % engine.vocab_size for position in range(length)]
    for start in range(0, args.context, 64):
        engine.forward([SequenceRows(tokens[start : min(start + 64, args.context)], start, table, [0])])

    def milliseconds(count: int) -> float:
        rows = SequenceRows(tokens[args.context : args.context + count], args.context, table, range(count))
        began = time.perf_counter()
        engine.local_logits(engine.forward([rows]))
        return 1e3 * (time.perf_counter() - began)

    times: dict[int, list[float]] = {count: [] for count in ROW_COUNTS}
    for run in range(args.runs + 1):
        for count in ROW_COUNTS:
            taken = milliseconds(count)
            if run:  # the first round warms up
                times[count].append(taken)
        print(f"round {run} of {args.runs}", file=sys.stderr)
    single = statistics.median(times[1])
    print(f"row invariant: {engine.row_invariant}")
    for count, values in times.items():
        median = statistics.median(values)
        print(f"{count:3} rows  {median:8.1f} ms  {median / single:5.2f} of one  (from {min(values):.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

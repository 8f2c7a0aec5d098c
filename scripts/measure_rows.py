"""Measure what a forward pass over several rows costs, against one row, on one rank, and where its time goes.

    python scripts/measure_rows.py MODEL_DIR [--dtype bfloat16] [--quantization int8] [--threads 1] [--context 128]

Verifying ``k`` proposed tokens is a pass over ``k + 1`` rows: speculation pays only where that costs about as much as
a pass over one. The runs of the different sizes take turns, so that a drift of the machine's speed falls on all alike;
the median of each is printed, head included, then the parts of it (medians too; a part's own time, without the parts
inside it), and at last the speed of plain greedy decoding.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from outrider.cluster.config import EngineConfig
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.parallel import Parallel

ROW_COUNTS = (1, 2, 3, 5, 9, 16)
PARTS = (
    "PackedLinear",
    "RowParallelLinear",
    "FusedAttention",
    "FusedSwiGLU",
    "FusedRMSNorm",
    "FusedBlock",
    "FusedDecoder",
    "VocabParallelHead",
)
REST = "the rest"


class Stopwatch:
    """Time that kinds of modules take, without the modules inside them."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.taken: dict[str, float] = collections.defaultdict(float)  # milliseconds
        self._open: list[list[float]] = []  # [begin, time of modules inside]
        modules = {module for root in roots for module in root.modules() if type(module).__name__ in PARTS}
        self._hooks: list[Any] = []
        for module in modules:
            self._hooks.append(module.register_forward_pre_hook(self._begin))
            self._hooks.append(module.register_forward_hook(self._end))

    def _begin(self, module: nn.Module, *_: Any) -> None:
        self._open.append([time.perf_counter(), 0.0])

    def _end(self, module: nn.Module, *_: Any) -> None:
        begin, inside = self._open.pop()
        whole = time.perf_counter() - begin
        self.taken[type(module).__name__] += 1e3 * (whole - inside)
        if self._open:
            self._open[-1][1] += whole

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128, help="positions before the first row")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32, help="to decode plainly")
    args = parser.parse_args()
    length = args.context + max(*ROW_COUNTS, args.tokens)
    config = EngineConfig.model_validate(
        {
            "model": args.model_dir,
            "dtype": args.dtype,
            "quantization": args.quantization,
            "quantization_group_size": args.group_size,
            "kv_cache_dtype": args.kv_cache_dtype,
            "num_threads": args.threads,
            "max_model_len": length,
            "num_kv_blocks": -(-length // 16),
        }
    )
    engine = Engine(config, Parallel.single())
    print(f"row invariant: {engine.row_invariant}")
    table = list(range(engine.num_blocks))
    tokens = [(7 * position + 1) % engine.vocab_size for position in range(length)]
    for start in range(0, args.context, 64):
        engine.forward([SequenceRows(tokens[start : min(start + 64, args.context)], start, table, [0])])

    def run(new: Sequence[int], start: int) -> torch.Tensor:
        return engine.local_logits(engine.forward([SequenceRows(new, start, table, range(len(new)))]))

    def milliseconds(count: int) -> float:
        began = time.perf_counter()
        run(tokens[args.context : args.context + count], args.context)
        return 1e3 * (time.perf_counter() - began)

    times: dict[int, list[float]] = {count: [] for count in ROW_COUNTS}
    for turn in range(args.runs + 1):
        for count in ROW_COUNTS:
            taken = milliseconds(count)
            if turn:  # the first round warms up
                times[count].append(taken)
        print(f"round {turn} of {args.runs}", file=sys.stderr)
    single = statistics.median(times[1])
    for count, values in times.items():
        median = statistics.median(values)
        print(f"{count:3} rows  {median:8.1f} ms  {median / single:5.2f} of one  (from {min(values):.1f})")

    for count in (1, 5):
        parts: dict[str, list[float]] = collections.defaultdict(list)
        for _ in range(args.runs):
            watch = Stopwatch([engine._decoder, engine._head])
            whole = milliseconds(count)
            watch.remove()
            for name, taken in (*watch.taken.items(), (REST, whole - sum(watch.taken.values()))):
                parts[name].append(taken)
        shares = ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in parts.items())
        print(f"{count:3} rows, ms: {shares}")

    began = time.perf_counter()
    token = tokens[args.context]
    for position in range(args.context, args.context + args.tokens):
        token = int(run([token], position).argmax())
    print(f"plain decoding: {args.tokens / (time.perf_counter() - began):.2f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

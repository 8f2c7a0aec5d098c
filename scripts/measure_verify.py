"""What deciding costs beside a model's pass: milliseconds of each way to sample, for several numbers of rows.

    python scripts/measure_verify.py [--vocab 151936] [--rows 1 5 40] [--repeat 9] [--threads 1]

Medians, with compiled passes and with torch alone. "pairs" is what decides greedy and plain coupled rows on one rank;
"target" the decision from whole rows, without proposals, or with one that is "lost"; "draft" what a draft worker does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched import wide
from outrider.kernels.batched.best import BestRows, best_of
from outrider.kernels.batched.data import Ask, Chain
from outrider.kernels.batched.draft import draw
from outrider.kernels.batched.verify import verify
from outrider.kernels.reference.verify import combine_best

TEXT = [7, 9, 5, 11, 9, 7]
WAYS = {
    "greedy": Sampling(temperature=0.0, verifier=Verifier.GREEDY),
    "coupled": Sampling(seed=3),
    "coupled, top-p": Sampling(temperature=0.8, top_p=0.95, seed=3),
    "coupled, top-k": Sampling(top_k=50, seed=3),
    "coupled, both": Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=3),
    "coupled, penalty": Sampling(seed=3, prompt_len=3, controls=(("presence_penalty", 0.5),)),
    "coupled, logprobs": Sampling(seed=3, logprobs=5),
    "greedy, logprobs": Sampling(temperature=0.0, verifier=Verifier.GREEDY, logprobs=5),
    "rejection": Sampling(seed=3, verifier=Verifier.REJECTION),
    "rejection, top-p": Sampling(temperature=0.8, top_p=0.95, seed=3, verifier=Verifier.REJECTION),
}


def rows_like_a_model(num_rows: int, vocab_size: int) -> torch.Tensor:
    """[num_rows, vocab_size] float32 whose probabilities fall off as those of a language model do."""
    generator = torch.Generator().manual_seed(num_rows)
    by_rank = (-1.2 * torch.arange(1, vocab_size + 1).log()).clamp(min=-14.0)
    order = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    return by_rank[order] + 0.5 * torch.randn(num_rows, vocab_size, generator=generator)


def from_pairs(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """The exchange of ranks that send pairs: each row is a sequence of its own."""
    values, tokens = best_of(
        logits, 0, [BestRows(i, i + 1, sampling, len(TEXT)) for i in range(len(logits))], is_alone=True
    )
    return combine_best(values[None], tokens[None]).tolist()


def medians_ms(call: Callable[[], object], repeat: int) -> tuple[float, float]:
    """With compiled passes and with torch alone, by turns."""
    widths = (wide.MIN_WIDTH, sys.maxsize)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * repeat + 2):
        wide.MIN_WIDTH = widths[turn % 2]
        begun = time.perf_counter()
        call()
        if turn > 1:
            times[turn % 2].append(1000 * (time.perf_counter() - begun))
    wide.MIN_WIDTH = widths[0]
    return statistics.median(times[0]), statistics.median(times[1])


def report(name: str, calls: Sequence[Callable[[], object]], repeat: int) -> None:
    pairs = [medians_ms(call, repeat) for call in calls]
    print(f"{name:28}" + "".join(f"{compiled:10.3f} {plain:8.2f}" for compiled, plain in pairs), flush=True)


def chains_of(rows: torch.Tensor, sampling: Sampling) -> list[Chain]:
    """Chains of one row, without proposals."""
    return [Chain(row[None], sampling, len(TEXT), (), (), TEXT) for row in rows]


def judged(rows: torch.Tensor, near: torch.Tensor, sampling: Sampling) -> list[Chain]:
    """Chains of one proposal each that is not accepted; what is behind it is not reached."""
    asks = [Ask(sampling, len(TEXT), i, TEXT) for i in range(len(rows))]
    chains = []
    for row, drawn in zip(rows, draw(near, asks, top_m=64), strict=True):
        if drawn is None or drawn.token_ids is None or drawn.probs is None:
            raise RuntimeError("the draft sends no row")
        q = torch.zeros(len(drawn.probs))
        q[drawn.token_ids == drawn.token] = 1.0
        low = row.clone()
        low[drawn.token] = -20.0
        chains.append(Chain(torch.stack([low, row]), sampling, len(TEXT), [drawn.token], [(drawn.token_ids, q)], TEXT))
    return chains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 40])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'':28}" + "".join(f"{count:>5} rows,    torch" for count in args.rows))
    batches = [rows_like_a_model(count, args.vocab) for count in args.rows]
    for way in ("greedy", "coupled"):
        calls = [partial(from_pairs, rows, WAYS[way]) for rows in batches]
        report(f"pairs, {way}", calls, args.repeat)
    for way, sampling in WAYS.items():
        report(f"target, {way}", [partial(verify, chains_of(rows, sampling)) for rows in batches], args.repeat)
        asks = [[Ask(sampling, len(TEXT), i, TEXT) for i in range(count)] for count in args.rows]
        calls = [partial(draw, rows, asked, top_m=64) for rows, asked in zip(batches, asks, strict=True)]
        report(f"draft, {way}", calls, args.repeat)
        if sampling.verifier is Verifier.REJECTION:
            calls = [partial(verify, judged(rows, rows, sampling)) for rows in batches]
            report(f"target, {way}, lost", calls, args.repeat)


if __name__ == "__main__":
    main()

"""What deciding costs beside a model's pass: milliseconds of each way to sample, for several numbers of rows.

    python scripts/measure_verify.py [--vocab 151936] [--rows 1 5 40] [--repeat 9] [--threads 1]

Medians. "target pairs" is what one rank brings to the exchange for greedy and plain coupled rows; "target" is the
decision from whole rows, for chains of one proposal and two rows each; "draft" what a draft worker draws from as many.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from outrider.core.sampling import Sampling, Verifier
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


def median_ms(call: Callable[[], object], repeat: int) -> float:
    call()
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 40])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'':28}" + "".join(f"{count:>6} rows" for count in args.rows))
    batches = [rows_like_a_model(count, args.vocab) for count in args.rows]
    for way in ("greedy", "coupled"):
        times = [median_ms(lambda rows=rows, way=way: from_pairs(rows, WAYS[way]), args.repeat) for rows in batches]
        print(f"{'target pairs, ' + way:28}" + "".join(f"{value:11.3f}" for value in times), flush=True)
    for way, sampling in WAYS.items():
        targets, drafts = [], []
        for rows in batches:
            asks = [Ask(sampling, len(TEXT), i, TEXT) for i in range(len(rows))]
            near = rows + 0.3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
            drafts.append(median_ms(lambda near=near, asks=asks: draw(near, asks, top_m=64), args.repeat))
            chains = []
            for row, drawn in zip(rows, draw(near, asks, top_m=64), strict=True):
                # Proposals are accepted or not; the row behind an accepted one is not part of what is measured.
                q = [(drawn.token_ids, drawn.probs)] if sampling.verifier is Verifier.REJECTION else []  # type: ignore[union-attr]
                logits = torch.stack([row, row])
                chains.append(Chain(logits, sampling, len(TEXT), [drawn.token], q, TEXT))  # type: ignore[union-attr, arg-type]
            targets.append(median_ms(lambda chains=chains: verify(chains), args.repeat))
        print(f"{'target, ' + way:28}" + "".join(f"{value:11.3f}" for value in targets), flush=True)
        print(f"{'draft, ' + way:28}" + "".join(f"{value:11.3f}" for value in drafts), flush=True)


if __name__ == "__main__":
    main()

"""Measure the Triton kernels against the GPU's memory bandwidth. Needs a GPU, and says so where there is none.

    python scripts/measure_triton.py [--rows 1,5,16,32,64] [--contexts 128,1024,4096] [--repeats 20]

Each figure is one call inside a captured CUDA graph that walks through as many matrices (or caches) as overflow the
GPU's second-level cache, as the layers of a model do. Bandwidth is what has to be read (weights, or keys and values up
to the context) by the time that a call takes, beside what copying a large tensor reaches. The linear layers are those
of Qwen2.5-Coder-1.5B, the attention is that of its layers: one sequence, whose last rows are a chain. Results are
compared with torch's, and each row's product alone with its product in company, by bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from outrider.kernels.cpu import plain, quantize_int8
from outrider.kernels.triton import missing

LAYERS = {"qkv": (2048, 1536), "out": (1536, 1536), "gate and up": (17920, 1536), "down": (1536, 8960)}
FORMATS = ("bfloat16", "int8", "int8 in groups of 64")
HEADS, KV_HEADS, HEAD_DIM = 12, 2, 128
WALKED = 512 << 20  # bytes: more than any second-level cache


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=_numbers, default=[1, 5, 16, 32, 64])
    parser.add_argument("--contexts", type=_numbers, default=[128, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if reason := missing():
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("nothing was measured: torch finds no GPU on this machine", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; medians of {options.repeats} in a CUDA graph")
    print(f"copying reads and writes {_copy_bandwidth(options.repeats):.0f} GB/s")
    measure_linear(options.rows, options.repeats)
    measure_attention(options.rows, options.contexts, options.repeats)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds of ``work`` as a captured graph."""
    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    taken = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken[2:])


def _copy_bandwidth(repeats: int) -> float:
    source = torch.zeros(WALKED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * WALKED / median_ms(lambda: target.copy_(source), repeats) / 1e6


def _weights(shape: tuple[int, int], form: str) -> Any:
    from outrider.kernels.triton.linear import LinearWeights

    weight = 0.02 * torch.randn(shape, device="cuda")
    if form == "bfloat16":
        return LinearWeights(weight.to(torch.bfloat16))
    rounded = quantize_int8(weight, 64 if "groups" in form else None)
    return LinearWeights(rounded.values, rounded.scales, rounded.group_size)


def measure_linear(row_counts: list[int], repeats: int) -> None:
    """Prints microseconds and GB/s for each layer, format and number of rows."""
    from outrider.kernels.cpu import Weights
    from outrider.kernels.triton.linear import allocate, linear

    for name, shape in LAYERS.items():
        for form in FORMATS:
            first = _weights(shape, form)
            size = first.values.nbytes + (0 if first.scales is None else first.scales.nbytes)
            count = max(1, WALKED // size)
            matrices = [first, *(_weights(shape, form) for _ in range(count - 1))]
            buffers = allocate(first, torch.bfloat16)
            buffers.x.copy_(torch.randn_like(buffers.x))
            together = linear(buffers, 64, first).clone()
            dense = Weights(first.values, first.scales, first.group_size)
            expected = plain.linear(buffers.x.float(), dense, None)
            error = float((together.float() - expected).abs().max() / expected.abs().max())
            kept = buffers.x.clone()
            alone = []
            for row in range(64):
                buffers.x[0] = kept[row]
                alone.append(linear(buffers, 1, first).clone())
            invariant = torch.equal(torch.cat(alone), together)
            buffers.x.copy_(kept)
            print(f"\n{name} {shape}, {form}: relative error {error:.1e}, rows are invariant: {invariant}")
            for rows in row_counts:
                ms = median_ms(lambda: [linear(buffers, rows, one) for one in matrices], repeats) / count  # noqa: B023
                torch_ms = float("nan")
                if form == "bfloat16":
                    x = kept[:rows]
                    torch_ms = median_ms(lambda: [x @ one.values.T for one in matrices], repeats) / count  # noqa: B023
                print(
                    f"  {rows:3} rows {1e3 * ms:8.1f} us {size / ms / 1e6:7.0f} GB/s   torch {1e3 * torch_ms:8.1f} us"
                )


def measure_attention(row_counts: list[int], contexts: list[int], repeats: int) -> None:
    """Prints microseconds and GB/s for each context and number of rows."""
    from outrider.kernels.triton.attention import attention
    from outrider.kernels.triton.buffers import AttentionBuffers

    for context in contexts:
        shape = (context, KV_HEADS, HEAD_DIM)
        size = 2 * 2 * context * KV_HEADS * HEAD_DIM
        count = min(256, max(1, WALKED // size))
        caches = [torch.randn((2, *shape), device="cuda").to(torch.bfloat16) for _ in range(count)]
        buffers = AttentionBuffers.allocate(HEADS, HEAD_DIM, context, context, torch.bfloat16, "cuda")
        buffers.query.copy_(torch.randn_like(buffers.query))
        buffers.slots.copy_(torch.randperm(context, device="cuda"))
        scale = HEAD_DIM**-0.5
        print(f"\nattention over {context} positions, {HEADS} heads, {KV_HEADS} of keys")
        for rows in row_counts:
            if rows > context:
                continue
            table = [[0, context - rows + 1 + row, context - rows, (1 << (row + 1)) - 1] for row in range(rows)]
            signed = [[*entry[:3], entry[3] - (entry[3] >> 63 << 64)] for entry in table]
            buffers.rows.zero_()
            buffers.rows[:rows] = torch.tensor(signed, device="cuda")
            found = attention(buffers, rows, context, *caches[0], scale).clone()
            expected = plain.attention(
                buffers.query[:rows].float(), *caches[0], buffers.slots, buffers.rows[:rows], scale
            )
            error = float((found.float() - expected).abs().max())
            ms = (
                median_ms(
                    lambda: [attention(buffers, rows, context, *one, scale) for one in caches],  # noqa: B023
                    repeats,
                )
                / count
            )
            print(f"  {rows:3} rows {1e3 * ms:8.1f} us {size / ms / 1e6:7.0f} GB/s   largest error {error:.1e}")


if __name__ == "__main__":
    sys.exit(main())

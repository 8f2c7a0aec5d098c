"""What the engine's tests run, in the test's own process for one rank and in a process of its own for each of several.

As a script: ``scenarios.py SETTINGS.json`` runs one rank and saves what it found.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cluster.config import EngineConfig
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.parallel import Parallel

BLOCK_SIZE = 4
NUM_BLOCKS = 320


def make_engine(model: str, parallel: Parallel | None = None, **settings: Any) -> Engine:
    values = {
        "model": model,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": NUM_BLOCKS,
        "max_num_batched_tokens": 384,
        "max_num_seqs": 16,
        "device": "cpu",
        "num_threads": 1,
        **settings,
    }
    return Engine(EngineConfig(**values), parallel or Parallel.single())


def blocks_for(length: int, rng: random.Random, taken: Sequence[int] = ()) -> list[int]:
    """A block table for ``length`` positions, in no order."""
    free = [block for block in range(NUM_BLOCKS) if block not in set(taken)]
    return rng.sample(free, -(-length // BLOCK_SIZE))


def run_chunks(engine: Engine, tokens: Sequence[int], table: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits of every row of one sequence that runs alone, in chunks. [len(tokens), vocab_size]"""
    parts = []
    start = 0
    for count in chunks:
        rows = SequenceRows(tokens[start : start + count], start, table, range(count))
        parts.append(engine.gather_logits(engine.local_logits(engine.forward([rows]))))
        start += count
    return torch.cat(parts)


def random_chunks(length: int, rng: random.Random, largest: int) -> list[int]:
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(min(rng.randint(1, largest), length - sum(chunks)))
    return chunks


def rollback_rounds(engine: Engine, seed: int, num_rounds: int, *, forget_truncation_in: int | None = None) -> bool:
    """Random rounds of run and truncate; whether the cache then equals, by bits, one built from the committed tokens.

    In round ``forget_truncation_in`` (a planted fault) the next start leaves one rejected position in place.
    """
    rng = random.Random(seed)
    tokens = [rng.randrange(engine.vocab_size) for _ in range(rng.randint(2, 20))]
    table = blocks_for(200, rng)
    valid = len(tokens) - 1
    position = 0
    for count in random_chunks(valid, rng, 8):
        engine.forward([SequenceRows(tokens[position : position + count], position, table)])
        position += count
    for number in range(num_rounds):
        k = rng.randint(1, 8)
        proposal = [rng.randrange(engine.vocab_size) for _ in range(k)]
        engine.forward([SequenceRows([tokens[-1], *proposal], valid, table, range(k + 1))])
        accepted = rng.randint(0, k - 1)
        tokens += [*proposal[:accepted], rng.randrange(engine.vocab_size)]
        valid += 1 + accepted
        if number == forget_truncation_in:
            engine.forward([SequenceRows([tokens[-1]], valid + 1, table)])
            tokens.append(rng.randrange(engine.vocab_size))
            valid += 1
    fresh_table = blocks_for(valid, rng, table)
    run_chunks(engine, tokens[:valid], fresh_table, random_chunks(valid, rng, 40))
    kept = engine.read_kv(table, valid)
    rebuilt = engine.read_kv(fresh_table, valid)
    return all(
        torch.equal(old_keys, keys) and torch.equal(old_values, values)
        for (old_keys, old_values), (keys, values) in zip(kept, rebuilt, strict=True)
    )


def tensor_of(rank: int, dtype: torch.dtype) -> Tensor:
    """Bits of all kinds: for floating types also NaNs with payloads, infinities and negative zeros. [3, 40]"""
    generator = torch.Generator().manual_seed(100 + rank)
    raw = torch.randint(-(2**15), 2**15, (3, 40 * dtype.itemsize), generator=generator).to(torch.int16)
    out = raw.view(torch.uint8).view(-1)[: 120 * dtype.itemsize].view(dtype).view(3, 40).clone()
    if dtype is torch.float32:  # a sum makes signalling NaNs quiet, and keeps the rest of their bits
        out = torch.where(out.isnan(), (out.view(torch.int32) | 1 << 22).view(torch.float32), out)
    if dtype.is_floating_point:
        out[0, 0], out[0, 1], out[0, 2], out[0, 3] = float("nan"), float("inf"), -float("inf"), -0.0
    return out


GATHERED = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16, torch.float16, torch.uint8)


def collectives(parallel: Parallel) -> dict[str, Any]:
    """What each rank heard of the others."""
    rank = parallel.rank
    found: dict[str, Any] = {"shared_memory": parallel.shared_memory}
    found["gathered"] = [parallel.gather(tensor_of(rank, dtype)) for dtype in GATHERED]
    sums = []
    for rows in (1, 3, 700):  # 700 rows of 1000 float32 take the way for long messages
        generator = torch.Generator().manual_seed(1000 * rows + rank)
        tensor = torch.randn(rows, 1000, generator=generator)
        tensor[0, rank] = float("nan")
        parallel.all_reduce(tensor)
        sums.append(tensor)
    found["sums"] = sums
    lists = ([], [1, -2, 2**62], list(range(5000)))
    found["broadcast"] = [parallel.broadcast_ints(values if rank == 0 else None, 20.0) for values in lists]
    parallel.barrier()
    return found


def row_sums_same(parallel: Parallel, hidden: int) -> bool:
    """Whether a row's sum over the ranks has the same bits alone and among others, in short and in long messages."""
    generator = torch.Generator().manual_seed(parallel.rank)
    rows = torch.randn(600, hidden, generator=generator)
    alone = []
    for row in rows[:8]:
        one = row.clone()
        parallel.all_reduce(one)
        alone.append(one)
    same = []
    for count in (2, 5, 8, 100, 600):
        several = rows[:count].clone()
        parallel.all_reduce(several)
        same += [torch.equal(several[index], alone[index]) for index in range(min(count, 8))]
    return all(same)


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 7, 70, 150)]


def model_run(engine: Engine) -> dict[str, Any]:
    rng = random.Random(9)
    logits = [
        run_chunks(engine, tokens, blocks_for(200, rng), random_chunks(len(tokens), rng, 33))
        for tokens in prompts(engine.vocab_size)
    ]
    hidden = torch.randn(1, engine.hidden_size, generator=torch.Generator().manual_seed(0))
    return {
        "logits": logits,
        "row_invariant": engine.row_invariant,
        "slice": (engine.vocab_offset, engine.local_vocab_size),
        "local_shape": tuple(engine.local_logits(hidden).shape),
        "kv_shape": tuple(engine.read_kv([0, 1], 5)[0][0].shape),
        "rollback": [rollback_rounds(engine, seed, 6) for seed in range(4)],
        "rollback_with_fault": [rollback_rounds(engine, seed, 6, forget_truncation_in=2) for seed in range(4)],
    }


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    parallel = Parallel.connect(
        rank=settings["rank"],
        world_size=settings["world_size"],
        local_size=settings["local_size"],
        master_addr="127.0.0.1",
        master_port=settings["port"],
        node_ip="127.0.0.1",
        timeout_s=100.0,
    )
    found: dict[str, Any] = {"collectives": collectives(parallel)}
    found["row_sums_same"] = [row_sums_same(parallel, hidden) for hidden in (64, 100)]
    if settings.get("model"):
        found["model"] = model_run(make_engine(settings["model"], parallel, **settings.get("engine", {})))
    torch.save(found, settings["out"])
    parallel.close()
    parallel.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

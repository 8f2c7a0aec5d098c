"""Under real traffic, the caches of every rank and of the draft hold what a cache rebuilt from the text would hold.

Requests of all verifiers, with 1 to 8 proposed tokens a round, join and leave a group of two ranks. Now and then each
rank copies what a plan declares valid (``outrider_testbed.host``). The rebuilt cache is that of one whole engine: by
bits for the draft, and up to the rounding of sums over two ranks for the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from outrider.cluster.config import EngineConfig
from outrider_testbed import TINY, Case, Testbed, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 1e-3  # entries are of the order of 1
CASES = [
    Case(
        (20 + n, 400 + 3 * n, 7) * (1 + n % 5),
        temperature=(1.0, 0.0, 0.8)[n % 3],
        seed=n,
        max_tokens=24 + 2 * n,
        verifier=("coupled", "rejection")[n % 2],
        num_speculative_tokens=1 + n % 8,
    )
    for n in range(16)
]


def rebuilt(engine: Any, tokens: Sequence[int]) -> list[np.ndarray]:
    """Keys and values of a text computed at once, per layer and in turn, [len(tokens), kv_heads, head_dim]."""
    from outrider.workers.engine.batch import SequenceRows

    table = list(range(-(-len(tokens) // engine.block_size)))
    engine.forward([SequenceRows(list(tokens), 0, table, ())])
    return [array.numpy() for layer in engine.read_kv(table, len(tokens)) for array in layer]


def whole_engine(model: str) -> Any:
    from outrider.workers.engine.engine import Engine
    from outrider.workers.engine.parallel import Parallel

    path = str(TINY / model)
    return Engine(EngineConfig(model=path, device="cpu", num_threads=1, max_model_len=512), Parallel.single())


def test_caches_hold_the_committed_text(testbed: Testbed) -> None:
    target, draft = testbed.target("two"), testbed.draft("tiny")
    drafted: list[tuple[list[int], list[np.ndarray]]] = []
    for rank in target.ranks:
        rank.call("keep_snapshots", 5, 60)

    def look(num_tokens: int) -> None:
        if num_tokens > 150 * (1 + len(looks)) and len(looks) < 3:
            looks.append(num_tokens)
            draft.host.call("check_integrity")
            drafted.extend(draft.host.call("session_caches"))

    looks: list[int] = []
    with testbed.cluster(target, (draft,), router={"max_num_seqs": 10}) as cluster:
        completions = run_all(cluster.address, CASES, on_token=look)
        (group,) = cluster.status()["groups"]
    assert group["kv_blocks_free"] == group["kv_blocks_total"]
    rejected = [c.speculation.num_draft_tokens - c.speculation.num_accepted_tokens for c in completions]
    assert sum(rejected) > 50, "hardly anything was rejected: nothing was proven"
    assert sum(completion.speculation.num_accepted_tokens for completion in completions) > 20

    engine = whole_engine("target")
    copies = [rank.call("snapshots") for rank in target.ranks]
    assert len(copies[0]) == len(copies[1]) > 30
    for copy, other in zip(*copies, strict=True):
        assert copy[0] == other[0], "the ranks hold different texts"
        for parts in zip(rebuilt(engine, copy[0]), copy[1], other[1], strict=True):
            truth, halves = parts[0], np.concatenate(parts[1:], axis=1)  # along the heads
            assert truth.shape == halves.shape
            assert np.abs(truth - halves).max() < ROUNDING

    engine = whole_engine("draft")
    assert sum(len(tokens) > 0 for tokens, _ in drafted) > 10
    for tokens, arrays in drafted:
        if tokens:
            for truth, array in zip(rebuilt(engine, tokens), arrays, strict=True):
                assert truth.tobytes() == array.tobytes()

"""A row's bits depend on its own context only; rolled-back caches equal caches that never went astray."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.workers.engine.attention import attend_rows, padded_context
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "rounded rows": {"dtype": "bfloat16", "activation_dtype": "bfloat16"},
    "int8": {"quantization": "int8", "quantization_group_size": 32, "kv_cache_dtype": "bfloat16"},
}


@pytest.fixture(scope="module", params=SETTINGS)
def engine(request: pytest.FixtureRequest, models: dict[str, str], scenarios: ModuleType) -> Engine:
    found: Engine = scenarios.make_engine(models["llama"], **SETTINGS[request.param])
    return found


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    start=st.integers(0, 300),
    heads=st.sampled_from([(1, 1, 16), (4, 2, 16), (6, 1, 32), (8, 8, 20), (14, 2, 64)]),
    clean=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention_of_a_row_is_the_same_alone_and_in_a_block(
    num_rows: int, start: int, heads: tuple[int, int, int], clean: bool, seed: int
) -> None:
    num_heads, kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    context = padded_context(start + num_rows)
    query = torch.randn(num_rows, num_heads, head_dim, generator=generator)
    keys = torch.randn(context, kv_heads, head_dim, generator=generator)
    values = torch.randn(context, kv_heads, head_dim, generator=generator)
    if not clean:
        values[start + num_rows - 1] = float("nan")  # of the last row, which no other row may see
    block = torch.empty_like(query)
    attend_rows(query, keys, values, start, 0.25, block)
    expected = torch.empty_like(query)
    for row in range(num_rows):
        own = padded_context(start + row + 1)
        attend_rows(query[row : row + 1], keys[:own], values[:own], start + row, 0.25, expected[row : row + 1])
    assert torch.equal(block[:-1], expected[:-1])
    torch.testing.assert_close(block[-1], expected[-1], rtol=0, atol=0, equal_nan=True)
    assert bool(block[:-1].isfinite().all())


def test_rows_are_the_same_alone_in_any_batch_and_in_any_chunk(engine: Engine, scenarios: ModuleType) -> None:
    assert engine.row_invariant
    rng = random.Random(3)
    tokens = [rng.randrange(engine.vocab_size) for _ in range(200)]
    table = scenarios.blocks_for(len(tokens), rng)
    one_by_one = scenarios.run_chunks(engine, tokens, table, [1] * len(tokens))
    for largest in (2, 5, 17, 64, 200):
        chunks = scenarios.random_chunks(len(tokens), rng, largest)
        other_table = scenarios.blocks_for(len(tokens), rng, table)
        assert torch.equal(scenarios.run_chunks(engine, tokens, other_table, chunks), one_by_one), chunks
    for num_neighbours in (1, 2, 7, 15):
        start = rng.randint(1, 150)
        count = rng.randint(1, 9)
        taken = list(table)
        batch = [SequenceRows(tokens[start : start + count], start, table, range(count))]
        for _ in range(num_neighbours):
            length = rng.randint(1, 12)
            other = scenarios.blocks_for(length, rng, taken)
            taken += other
            batch.append(SequenceRows([rng.randrange(300) for _ in range(length)], 0, other, [length - 1]))
        rng.shuffle(batch)
        before = sum(len(rows.logits_rows) for rows in batch[: [rows.start for rows in batch].index(start)])
        logits = engine.local_logits(engine.forward(batch))
        assert torch.equal(logits[before : before + count], one_by_one[start : start + count])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_after_rollbacks_the_cache_is_as_if_nothing_had_been_rejected(
    family: str, settings: dict[str, Any], models: dict[str, str], scenarios: ModuleType
) -> None:
    engine = scenarios.make_engine(models[family], **settings)
    assert all(scenarios.rollback_rounds(engine, seed, 12) for seed in range(6))


def test_a_forgotten_truncation_is_seen(engine: Engine, scenarios: ModuleType) -> None:
    assert not any(scenarios.rollback_rounds(engine, seed, 6, forget_truncation_in=3) for seed in range(6))


def test_what_is_not_a_number_stays_in_its_sequence(engine: Engine, scenarios: ModuleType) -> None:
    rng = random.Random(8)
    sick_table = scenarios.blocks_for(70, rng)
    well_table = scenarios.blocks_for(70, rng, sick_table)
    tokens = [rng.randrange(300) for _ in range(66)]
    engine.forward([SequenceRows(tokens[:60], 0, well_table)])
    expected = engine.local_logits(engine.forward([SequenceRows(tokens[60:], 60, well_table, range(6))]))
    for keys, values in zip(engine._cache.keys, engine._cache.values, strict=True):
        # Everything but the well sequence's own positions: other sequences, block 0, and slots it once wrote.
        own = torch.tensor([block * engine.block_size + slot for block in well_table for slot in range(4)][:60])
        sick = torch.ones(len(keys), dtype=torch.bool)
        sick[own] = False
        keys[sick], values[sick] = float("nan"), float("inf")
    batch = [
        SequenceRows(tokens[60:], 60, sick_table, range(6)),
        SequenceRows(tokens[60:], 60, well_table, range(6)),
    ]
    logits = engine.local_logits(engine.forward(batch))
    assert bool(logits[:6].isnan().all())
    assert torch.equal(logits[6:], expected)

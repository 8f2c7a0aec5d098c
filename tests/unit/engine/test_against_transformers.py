"""The engine gives transformers' own logits, however requests are packed and cut into chunks."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from outrider.workers.engine.batch import SequenceRows


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral"])
def test_packed_chunked_batches_give_the_models_own_logits(
    family: str, models: dict[str, str], scenarios: ModuleType
) -> None:
    from transformers import AutoModelForCausalLM

    engine = scenarios.make_engine(models[family])
    reference = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32).eval()
    rng = random.Random(1)
    prompts = scenarios.prompts(engine.vocab_size)
    taken: list[int] = []
    tables = []
    for tokens in prompts:
        tables.append(scenarios.blocks_for(len(tokens), rng, taken))
        taken += tables[-1]
    done = [0] * len(prompts)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(count < len(tokens) for count, tokens in zip(done, prompts, strict=True)):
        batch, owners = [], []
        for index, tokens in enumerate(prompts):
            count = min(rng.randint(0, 40), len(tokens) - done[index])
            if count:
                rows = tokens[done[index] : done[index] + count]
                batch.append(SequenceRows(rows, done[index], tables[index], range(count)))
                owners.append(index)
                done[index] += count
        if not batch:
            continue
        logits = engine.local_logits(engine.forward(batch))
        parts = logits.split([len(rows.tokens) for rows in batch])
        for index, part in zip(owners, parts, strict=True):
            found[index].append(part)
    for tokens, parts in zip(prompts, found, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0, :, : engine.vocab_size]
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_facts_of_the_model(models: dict[str, str], scenarios: ModuleType) -> None:
    from outrider.core.fingerprint import tokenizer_fingerprint

    engine = scenarios.make_engine(models["llama"])
    assert (engine.vocab_size, engine.vocab_offset, engine.local_vocab_size) == (300, 0, 300)
    assert engine.fingerprint == tokenizer_fingerprint(models["llama"])
    assert (engine.max_model_len, engine.block_size, engine.num_blocks) == (512, 4, 320)
    assert engine.end_token_ids == {1}
    assert engine.dtype is torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_are_close(dtype: str, models: dict[str, str], scenarios: ModuleType) -> None:
    full = scenarios.make_engine(models["llama"])
    half = scenarios.make_engine(models["llama"], dtype=dtype)
    assert half.dtype is getattr(torch, dtype)
    tokens = scenarios.prompts(300)[2]
    table = scenarios.blocks_for(len(tokens), random.Random(0))
    expected = scenarios.run_chunks(full, tokens, table, [len(tokens)])
    found = scenarios.run_chunks(half, tokens, table, [30, 1, len(tokens) - 31])
    error = (found - expected).norm() / expected.norm()
    assert found.dtype is torch.float32
    assert error < 0.05

"""A block's two calls give the bits of the layers that they join, for any number of rows and threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from outrider.kernels.cpu import load_kernels
from outrider.workers.engine.attention import STEP_KEYWORD, AttentionStep, SequenceSlots, padded_context
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.fused import FusedBlock

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="this machine has no compiled kernels")

SETTINGS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8 in groups": {"quantization": "int8", "quantization_group_size": 32},
    "narrow cache": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
}


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


def step_of(engine: Engine, layer: int, num_rows: int, start: int) -> AttentionStep:
    """A sequence with random keys and values before its rows."""
    generator = torch.Generator().manual_seed(start)
    like = engine._cache.keys[0]
    context = padded_context(start + num_rows)
    keys, values = (
        torch.randn(context, *like.shape[1:], generator=generator).to(engine._cache_dtype) for _ in range(2)
    )
    slots = torch.randperm(context, generator=generator)
    mapping = slots[start : start + num_rows].contiguous()
    sequence = SequenceSlots(0, num_rows, start, slots)
    return AttentionStep([keys] * (layer + 1), [values] * (layer + 1), mapping, [sequence], max_context=1)


@pytest.mark.parametrize("form", SETTINGS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_block_gives_the_bits_of_its_parts(
    family: str, form: str, threads: int, models: dict[str, str], scenarios: ModuleType
) -> None:
    engine = scenarios.make_engine(models[family], **SETTINGS[form])
    torch.set_num_threads(threads)
    block = next(module for module in engine._decoder.modules() if isinstance(module, FusedBlock))
    layer = block.attention.shape.layer
    for num_rows, start in ((1, 0), (1, 70), (5, 3), (17, 40), (200, 0)):
        generator = torch.Generator().manual_seed(num_rows)
        hidden = torch.randn(1, num_rows, engine.hidden_size, generator=generator)
        kept = hidden.clone()
        positions = torch.arange(start, start + num_rows)[None]
        with torch.inference_mode():
            rotation = engine._decoder.rotary_emb(hidden, positions)
            step, other = (step_of(engine, layer, num_rows, start) for _ in range(2))
            found = block(hidden, position_embeddings=rotation, attention_mask=None, **{STEP_KEYWORD: step})[0]
            rows = hidden[0]
            rows = rows + block.attention.attend(block.attention_norm(rows), rotation, other)
            expected = rows + block.mlp(block.mlp_norm(rows))
        assert torch.equal(found, expected)
        assert torch.equal(step.keys[layer], other.keys[layer])
        assert torch.equal(step.values[layer], other.values[layer])
        assert torch.equal(hidden, kept)

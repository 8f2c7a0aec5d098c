"""Fused blocks and decoders give the bits of what they join, for any number of rows and threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from outrider.kernels.cpu import load_kernels
from outrider.workers.engine.attention import STEP_KEYWORD, AttentionStep, SequenceSlots, padded_context
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.fused import FusedBlock
from outrider.workers.engine.fused_decoder import FusedDecoder

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="this machine has no compiled kernels")

SETTINGS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8 in groups": {"quantization": "int8", "quantization_group_size": 32},
    "narrow cache": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "rounded rows": {"dtype": "bfloat16", "activation_dtype": "bfloat16"},
    "rounded rows of int8": {"quantization": "int8", "activation_dtype": "bfloat16"},
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


@pytest.mark.parametrize("form", SETTINGS)
def test_a_decoder_gives_the_bits_of_its_blocks(
    form: str, threads: int, models: dict[str, str], scenarios: ModuleType
) -> None:
    engine = scenarios.make_engine(models["qwen3"], **SETTINGS[form])
    torch.set_num_threads(threads)
    decoder = engine._decoder
    assert isinstance(decoder, FusedDecoder)
    tokens = [(7 * position + 1) % engine.vocab_size for position in range(90)]

    table = list(range(-(-90 // engine.block_size)))

    def run() -> torch.Tensor:
        parts = [(0, 1), (1, 6), (6, 70), (70, 90)]
        return torch.cat(
            [
                engine.forward([SequenceRows(tokens[start:stop], start, table, range(stop - start))])
                for start, stop in parts
            ]
        )

    found = run()
    decoder._stack = None
    assert torch.equal(found, run())


def test_a_decoder_that_does_more_than_its_parts_say_is_kept(
    models: dict[str, str], scenarios: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

    original = Qwen2Model.forward

    def scaled(self: Qwen2Model, input_ids: torch.Tensor, **keywords: object) -> object:
        embedded = 1.01 * self.embed_tokens(input_ids)
        return original(self, inputs_embeds=embedded, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Qwen2Model, "forward", scaled)
    engine = scenarios.make_engine(models["qwen2"], dtype="bfloat16")
    assert type(engine._decoder) is Qwen2Model

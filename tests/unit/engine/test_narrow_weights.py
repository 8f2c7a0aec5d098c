"""Engines with bfloat16 and int8 weights against float32 ones that hold the same numbers."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from outrider.core.errors import ConfigError
from outrider.kernels.cpu import instruction_sets, quantize_int8, round_to_bfloat16
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.fused import FusedAttention, FusedBlock, FusedRMSNorm, FusedSwiGLU
from outrider.workers.engine.linear import PackedLinear
from outrider.workers.engine.products import KernelProduct

RoundedMaker = Callable[[str, str], str]

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"
SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8 in groups": {"quantization": "int8", "quantization_group_size": 24},
}
ROUNDING = {
    "bfloat16": round_to_bfloat16,
    "int8": quantize_int8,
    "int8 in groups": lambda weight: quantize_int8(weight, 24),
}

needs_kernels = pytest.mark.skipif(not instruction_sets(), reason="no compiled kernels on this machine")


@pytest.fixture(scope="session")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> RoundedMaker:
    """rounded(folder, form) -> a copy of a model whose weights are already what they are rounded to, kept in float32"""

    def make(folder: str, form: str) -> str:
        from safetensors.torch import load_file, save_file

        target = tmp_path_factory.mktemp("rounded")
        shutil.copytree(folder, target, dirs_exist_ok=True)
        tensors = load_file(target / "model.safetensors")
        tied = json.loads((target / "config.json").read_text())["tie_word_embeddings"]
        for name, tensor in tensors.items():
            if name.endswith(("proj.weight", "lm_head.weight")) or (tied and "embed_tokens" in name):
                tensors[name] = ROUNDING[form](tensor).dense()
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return str(target)

    return make


def fused_layers(engine: Engine) -> dict[type, int]:
    kinds = [type(module) for module in engine._decoder.modules()]
    return {kind: kinds.count(kind) for kind in (FusedAttention, FusedSwiGLU, FusedRMSNorm, FusedBlock)}


def logits_of(engine: Engine, scenarios: ModuleType) -> torch.Tensor:
    rng = random.Random(2)
    tokens = scenarios.prompts(engine.vocab_size)[2]
    out: torch.Tensor = scenarios.run_chunks(
        engine, tokens, scenarios.blocks_for(len(tokens), rng), scenarios.random_chunks(len(tokens), rng, 20)
    )
    return out


@needs_kernels
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("form", SETTINGS)
def test_logits_are_those_of_the_rounded_weights(
    family: str, form: str, models: dict[str, str], rounded: RoundedMaker, scenarios: ModuleType
) -> None:
    folder = rounded(models[family], form)
    engine = scenarios.make_engine(folder, **SETTINGS[form])
    assert fused_layers(engine) == {FusedAttention: 2, FusedSwiGLU: 2, FusedRMSNorm: 5, FusedBlock: 2}
    assert engine.row_invariant
    expected = logits_of(scenarios.make_engine(folder), scenarios)
    found = logits_of(engine, scenarios)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-3)
    # And of no others: rounding is far from nothing.
    other = logits_of(scenarios.make_engine(models[family]), scenarios)
    assert (other - expected).norm() > 20 * (found - expected).norm()


@needs_kernels
@pytest.mark.parametrize(
    ("family", "overrides", "kept"),
    [
        ("gemma", {"head_dim": 16}, {"norms (GemmaRMSNorm)", "MLPs (GemmaMLP)"}),  # 1 + weight, and GELU
        (
            "glm",
            {"head_dim": 16, "pad_token_id": 0},
            {"attention layers (GlmAttention)"},
        ),  # neighbours are turned, not halves
        ("olmo2", {"pad_token_id": 0}, {"attention layers (Olmo2Attention)"}),  # norms over all heads
        ("llama", {"head_dim": 12}, {"attention layers (LlamaAttention)"}),
        ("llama", {"mlp_bias": True, "attention_bias": True}, set()),
        ("phi3", {"pad_token_id": 0}, set()),  # its products are joined already: nothing to look at
    ],
)
def test_what_differs_from_ours_is_kept(
    family: str,
    overrides: dict[str, Any],
    kept: set[str],
    make_model: Callable[..., str],
    rounded: RoundedMaker,
    scenarios: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = rounded(make_model(family, tie_word_embeddings=False, **overrides), "bfloat16")
    with caplog.at_level(logging.WARNING):
        engine = scenarios.make_engine(folder, dtype="bfloat16")
    lines = [record.getMessage() for record in caplog.records if "kept" in record.getMessage()]
    assert len(lines) == len(kept)
    assert all(any(name in line for line in lines) for name in kept), lines
    assert engine.row_invariant
    expected = logits_of(scenarios.make_engine(folder), scenarios)
    torch.testing.assert_close(logits_of(engine, scenarios), expected, atol=5e-4, rtol=1e-3)


@needs_kernels
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_rounded_rows_are_those_of_every_product(
    family: str, form: str, models: dict[str, str], scenarios: ModuleType
) -> None:
    exact = scenarios.make_engine(models[family], **SETTINGS[form])
    engine = scenarios.make_engine(models[family], **SETTINGS[form], activation_dtype="bfloat16")
    assert fused_layers(engine) == fused_layers(exact)
    assert type(engine._decoder) is type(exact._decoder)
    assert engine.row_invariant
    products = [
        layer.product
        for part in (engine._decoder, engine._head)
        for layer in part.modules()
        if isinstance(layer, PackedLinear)
    ]
    assert len(products) == 2 * 4 + 1
    assert all(isinstance(product, KernelProduct) and product.weights.rounds_rows for product in products)
    expected, found = logits_of(exact, scenarios), logits_of(engine, scenarios)
    if "amx" not in instruction_sets():  # nothing would be faster
        assert torch.equal(found, expected)
        return
    assert not torch.equal(found, expected)
    # bfloat16 has 8 bits, and a row's roundings cancel; digits have 16.
    assert (found - expected).norm() < (2**-6 if form == "bfloat16" else 2**-12) * expected.norm()


def test_without_kernels_the_same_numbers_are_multiplied_in_float32(
    models: dict[str, str], rounded: RoundedMaker, scenarios: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.workers.engine.products.load_kernels", lambda: None)
    for form in ("bfloat16", "int8 in groups"):
        folder = rounded(models["qwen2"], form)
        engine = scenarios.make_engine(folder, **SETTINGS[form], kv_cache_dtype="bfloat16")
        assert fused_layers(engine) == {FusedAttention: 0, FusedSwiGLU: 0, FusedRMSNorm: 0, FusedBlock: 0}
        assert engine.row_invariant
        plain = scenarios.make_engine(folder, kv_cache_dtype="bfloat16")
        expected = logits_of(plain, scenarios)
        torch.testing.assert_close(logits_of(engine, scenarios), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("form", "cache"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_type_of_cached_keys_and_values(
    form: str, cache: torch.dtype, models: dict[str, str], scenarios: ModuleType
) -> None:
    engine = scenarios.make_engine(models["llama"], dtype="bfloat16", kv_cache_dtype=form)
    logits_of(engine, scenarios)
    assert engine.read_kv([0], 4)[0][0].dtype is cache
    assert engine.dtype is torch.bfloat16


def test_a_sliding_window_shorter_than_the_context_is_refused(
    make_model: Callable[..., str], scenarios: ModuleType
) -> None:
    folder = make_model("mistral", sliding_window=64)
    with pytest.raises(ConfigError, match="sliding window allows at most 64"):
        scenarios.make_engine(folder, dtype="bfloat16")
    assert scenarios.make_engine(folder, dtype="bfloat16", max_model_len=64).max_model_len == 64


def test_speculation_changes_no_token_of_the_tiny_pair(scenarios: ModuleType) -> None:
    """Greedy: a bfloat16 target alone, and with blocks that an int8 draft proposes."""
    target = scenarios.make_engine(str(TINY / "target"), dtype="bfloat16")
    draft = scenarios.make_engine(str(TINY / "draft"), quantization="int8")
    rng = random.Random(4)
    accepted = 0
    for _ in range(4):
        prompt = [rng.randrange(target.vocab_size) for _ in range(rng.randint(1, 30))]
        length = len(prompt) + 48
        table = scenarios.blocks_for(length + 8, rng)
        plain = list(prompt)
        position = 0
        while len(plain) < length:
            plain.append(greedy(target, plain[position:], position, table)[-1])
            position = len(plain) - 1
        tokens = list(prompt)
        position = 0
        while len(tokens) < length:
            proposal: list[int] = []
            start = 0
            for _ in range(4):
                known = [*tokens, *proposal]
                proposal.append(greedy(draft, known[start:], start, table)[-1])
                start = len(known)
            found = greedy(target, [*tokens[position:], *proposal], position, table)[-len(proposal) - 1 :]
            same = 0
            while same < len(proposal) and proposal[same] == found[same]:
                same += 1
            accepted += same
            position = len(tokens) + same
            tokens += found[: same + 1]
        assert tokens[:length] == plain[:length]
    assert accepted > 0


def greedy(engine: Engine, tokens: list[int], start: int, table: list[int]) -> list[int]:
    """The most likely token after each of the rows."""
    hidden = engine.forward([SequenceRows(tokens, start, table, range(len(tokens)))])
    found: list[int] = engine.local_logits(hidden).argmax(dim=-1).tolist()
    return found

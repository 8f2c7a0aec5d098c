"""The committed tiny pair is what its README says: one vocabulary, small, and close enough to speculate with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

from outrider.core.fingerprint import tokenizer_fingerprint

ROOT = Path(__file__).resolve().parents[3]
PAIR = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny_pair", ROOT / "scripts" / "train_tiny_pair.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def config(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((PAIR / name / "config.json").read_text())
    return content


def test_pair_takes_at_most_twelve_megabytes() -> None:
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 12_000_000


def test_both_have_one_tokenizer_and_different_padding() -> None:
    assert tokenizer_fingerprint(PAIR / "target") == tokenizer_fingerprint(PAIR / "draft")
    entries = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    target_rows, draft_rows = config("target")["vocab_size"], config("draft")["vocab_size"]
    assert isinstance(target_rows, int)
    assert isinstance(draft_rows, int)
    assert entries < target_rows < draft_rows


def test_draft_has_the_shorter_context() -> None:
    assert (config("target")["max_position_embeddings"], config("draft")["max_position_embeddings"]) == (1024, 512)


def test_target_divides_by_two() -> None:
    heads, kv_heads = config("target")["num_attention_heads"], config("target")["num_key_value_heads"]
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    assert heads % 2 == kv_heads % 2 == 0


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    text = "naïve façade, 日本語, 🐍🚀\n\tdef f(x):\n        return 1234  # end \r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_loads_both_with_chat_template_and_end_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("target", "draft"):
        model = transformers.AutoModelForCausalLM.from_pretrained(PAIR / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(PAIR / name)
        assert model.dtype == torch.float32
        assert tokenizer.eos_token == "<|endoftext|>"
        ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
        assert model.generation_config.eos_token_id == ends
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is a list?"}], tokenize=False, add_generation_prompt=True
        )
        assert prompt == "<|im_start|>user\nWhat is a list?<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        # Padding rows learned to be unlikely: what is left for them is far below what a test could see.
        probs = model(ids).logits[0, -1].softmax(-1)
        assert probs[len(tokenizer) :].sum() < 1e-3


def test_acceptance_at_temperature_one_is_in_range(script: ModuleType) -> None:
    target, draft, tokenizer = script.load(PAIR)
    figures = script.measure(target, draft, script.held_out_windows(tokenizer, limit=8))
    assert 0.5 <= figures["acceptance"] <= 0.9
    # The target learned something: far below the uniform distribution's log(1500) = 7.3 nats.
    assert figures["target_loss"] < 5.0

"""The pair as folders of transformers, with a page that describes it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from tiny_pair.text import END_OF_TEXT, IM_END, IM_START, NUM_TOKENS
from tiny_pair.training import DRAFT_CONTEXT, DRAFT_ROWS, DRAFT_SHAPE, TARGET_CONTEXT, TARGET_ROWS, TARGET_SHAPE

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save(folder: Path, model: Qwen2ForCausalLM, tokenizer: Tokenizer, context: int) -> None:
    """Weights in float32 and everything that transformers' Auto classes look for."""
    ends = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)]
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [IM_START, IM_END],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[0], "do_sample": True})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_readme(folder: Path, figures: dict[str, float], minutes: float, text: str) -> None:
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in figures.items())
    version, torch_version = platform.python_version(), torch.__version__.split("+")[0]
    (folder / "README.md").write_text(
        f"""# The tiny pair

A target (`target/`, {describe(TARGET_SHAPE)}) and a draft (`draft/`, {describe(DRAFT_SHAPE)}) of the Qwen2
architecture with one byte-level BPE tokenizer of {NUM_TOKENS} entries, for demos and tests.
{total / 1e6:.1f} MB in all, float32.

They learned from the text that Python {version} ships: the language reference of `pydoc` and the docstrings of
the standard library; the draft learned from the target's distributions. They write something that looks like Python's
documentation and means nothing.

The embeddings are padded to different row counts ({TARGET_ROWS} and {DRAFT_ROWS}) and the contexts differ
({TARGET_CONTEXT} and {DRAFT_CONTEXT} positions) on purpose: real pairs have both.

At temperature 1 on held-out documents, as `python scripts/train_tiny_pair.py --measure` prints it:

| figure | value |
| --- | --- |
{rows}

Acceptance is the mean over positions of `sum(min(p, q))`, which is 1 minus the total variation distance. Losses are
nats per token. With the docstrings of another Python version the figures differ slightly.

Made by `python scripts/train_tiny_pair.py` (torch {torch_version}, {minutes:.0f} minutes of one core).
A sample of the target at temperature 1:

```text
{text}
```
"""
    )


def describe(shape: dict[str, int]) -> str:
    layers = shape["num_hidden_layers"]
    return f"{layers} layer{'s' if layers > 1 else ''}, width {shape['hidden_size']}"


def load(folder: Path) -> tuple[Qwen2ForCausalLM, Qwen2ForCausalLM, Tokenizer]:
    """The pair that is in ``folder``, ready to measure."""
    target = Qwen2ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    draft = Qwen2ForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32).eval()
    return target, draft, Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))

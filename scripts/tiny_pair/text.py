"""The text that Python itself ships, and a tokenizer that is trained on it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_TOKENS = 1500

# The pattern of GPT-2 with single digits, and runs of spaces kept together for indented text.
SPLIT = r"'(?i:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SKIPPED_PACKAGES = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}


def documents() -> tuple[list[str], list[str]]:
    """Training and held-out documents, in a fixed order; a document's title decides which side it is on."""
    training, held_out = [], []
    seen = set()
    for title, text in _titled_texts():
        if text in seen:
            continue
        seen.add(text)
        digest = hashlib.sha256(title.encode()).digest()
        if digest[0] % 3 == 0:
            document = (
                f"{IM_START}user\nWhat is {title}?{IM_END}\n{IM_START}assistant\n{text.strip()}{IM_END}\n{END_OF_TEXT}"
            )
        else:
            document = f"{title}\n\n{text.strip()}\n{END_OF_TEXT}"
        (held_out if digest[1] % 32 == 0 else training).append(document)
    return training, held_out


def _titled_texts() -> Iterator[tuple[str, str]]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    yield from sorted(topics.items())
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        inside = path.relative_to(library)
        if SKIPPED_PACKAGES & set(inside.parts):
            continue
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        yield from _docstrings(ast.parse(path.read_bytes()), module)


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and 60 <= len(text) <= 4000 and text.isascii():
            yield name, text
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with NUM_TOKENS entries, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts, one after the other: [num_tokens] int64."""
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([token for encoding in encodings for token in encoding.ids])

"""Trains the tiny pair in models/tiny: a target and a draft that share one tokenizer.

The text is what Python itself ships: the language reference of ``pydoc`` and the docstrings of the standard library.
The target learns from the text; the draft learns from the target's distributions over it, so that the two agree often
enough for speculation to be worth watching. Everything is seeded: the same Python, torch and machine give the same
weights.

    python scripts/train_tiny_pair.py             # about eight minutes of one core; writes models/tiny
    python scripts/train_tiny_pair.py --measure   # acceptance of the pair that is there
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps it out

from tiny_pair.figures import held_out_windows, measure, sample
from tiny_pair.files import load, save, write_readme
from tiny_pair.text import documents, encode, train_tokenizer
from tiny_pair.training import DRAFT_CONTEXT, SEED, TARGET_CONTEXT, train_pair

FOLDER = Path(__file__).resolve().parent.parent / "models" / "tiny"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny pair, or measure the one that is there.")
    parser.add_argument("--measure", action="store_true", help="measure only; prints the figures as JSON")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pair is (default: models/tiny)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    if arguments.measure:
        target, draft, tokenizer = load(arguments.folder)
        print(json.dumps(measure(target, draft, held_out_windows(tokenizer)), indent=2))
        return

    training, _ = documents()
    tokenizer = train_tokenizer(training)
    # The language reference counts twice: it is the best prose there is in the text.
    tokens = encode(tokenizer, training + [text for text in training if len(text) > 4000])
    print(
        f"{len(training)} documents, {len(tokens)} tokens, {tokenizer.get_vocab_size()} tokenizer entries", flush=True
    )
    target, draft = train_pair(tokenizer, tokens)
    save(arguments.folder / "target", target, tokenizer, TARGET_CONTEXT)
    save(arguments.folder / "draft", draft, tokenizer, DRAFT_CONTEXT)
    figures = measure(target, draft, held_out_windows(tokenizer))
    print(json.dumps(figures, indent=2))
    text = sample(target, tokenizer, "The with statement", 160)
    write_readme(arguments.folder, figures, time.process_time() / 60, text)


if __name__ == "__main__":
    main()

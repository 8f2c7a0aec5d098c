"""Case M2: rows of the embedding beyond the tokenizer's entries have no logits, however large they would be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.linear import VocabParallelHead
from outrider.workers.engine.parallel import Parallel
from outrider.workers.engine.products import WeightFormat

VOCAB_SIZE = 300
PLAIN = WeightFormat(torch.float32, torch.float32)


def test_padding_of_the_head_has_no_logits(make_model: Callable[..., str], scenarios: ModuleType) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = make_model("llama", tie_word_embeddings=False)
    rows = [SequenceRows([5, 6, 7], 0, [0], [0, 1, 2])]
    quiet_engine = scenarios.make_engine(folder)
    quiet = quiet_engine.local_logits(quiet_engine.forward(rows))

    weights = Path(folder) / "model.safetensors"
    tensors = load_file(weights)
    padding = tensors["lm_head.weight"][VOCAB_SIZE:]
    assert len(padding) > 0
    # Large along a hidden state of either sign: some padding row wins every argmax that it takes part in.
    padding[0::2], padding[1::2] = 1000.0 * padding[:1], -1000.0 * padding[:1]
    save_file(tensors, weights, metadata={"format": "pt"})

    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([[5, 6, 7]])).logits[0]
    assert bool((whole.argmax(dim=-1) >= VOCAB_SIZE).all()), "the padding is not loud: nothing was proven"
    engine = scenarios.make_engine(folder)
    logits = engine.local_logits(engine.forward(rows))
    assert logits.shape == (3, VOCAB_SIZE)
    assert torch.equal(logits, quiet)


def test_slices_of_the_ranks_hold_the_tokenizers_entries_and_no_padding() -> None:
    weight = torch.randn(320, 16, generator=torch.Generator().manual_seed(1))
    weight[299:] *= 1000.0
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    for world_size in (1, 2, 3, 4):
        heads = [
            VocabParallelHead(weight, None, 299, Parallel(rank, world_size, 1), PLAIN) for rank in range(world_size)
        ]
        logits = torch.cat([head(hidden) for head in heads], dim=1)
        assert logits.shape == (4, 299)
        torch.testing.assert_close(logits, hidden @ weight[:299].T)
        assert [head.vocab_offset for head in heads] == [rank * heads[0].slice_size for rank in range(world_size)]

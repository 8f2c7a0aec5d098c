"""The target as transformers runs it, without any of our engine: scores and plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.core.fingerprint import read_vocab, vocab_size
from outrider.kernels.reference.noise import Purpose, gumbel, noise_key
from outrider.kernels.reference.transforms import log_probs


class Oracle:
    """Scores of next tokens. The token with the highest score is the one that greedy or coupled decoding commits."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.vocab_size = vocab_size(read_vocab(str(model)))

    def scores(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        choice: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> torch.Tensor:
        """Scores [len(tokens), vocab_size] float64 of the token after each prefix: logits, or log p + g if sampled."""
        logits = self._logits(tokens)
        if temperature == 0.0:
            return logits.double()
        scores = log_probs(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        ids = torch.arange(self.vocab_size)
        for row in range(len(tokens)):
            scores[row] += gumbel(noise_key(seed, choice, row + 1, Purpose.COUPLED), ids)
        return scores

    def gap(self, prompt: Sequence[int], output: Sequence[int], **sampling: Any) -> float:
        """How far the worst chosen token of an output lies below the best score of its row; 0: it is exactly ours."""
        scores = self.scores([*prompt, *output], **sampling)[len(prompt) - 1 : -1]
        chosen = scores.gather(1, torch.tensor(list(output))[:, None])[:, 0]
        return float((scores.max(dim=1).values - chosen).max())

    def log_probabilities(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocab_size] float64 of the token after each prefix."""
        return self._logits(tokens).double().log_softmax(dim=-1)

    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0, :, : self.vocab_size].float()
        return logits

"""How well the draft foretells the target on text that neither saw, and a sample of what they write."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from tiny_pair.text import END_OF_TEXT, documents, encode
from tiny_pair.training import SEED, log_probs


@torch.no_grad()
def measure(
    target: Qwen2ForCausalLM,
    draft: Qwen2ForCausalLM,
    windows: torch.Tensor,  # [num_windows, length + 1] int64
) -> dict[str, float]:
    """Figures at temperature 1 over the windows' positions.

    ``acceptance`` is the mean of sum(min(p, q)) = 1 - TV(p, q): the chance that rejection sampling accepts a token that
    the draft drew (Leviathan, Kalman, Matias, arXiv 2211.17192, corollary 3.6). ``loss`` is nats per token.
    """
    accepted, agree, losses, draft_losses = [], [], [], []
    for window in windows:
        inputs, labels = window[None, :-1], window[None, 1:, None]
        target_log_probs, draft_log_probs = log_probs(target, inputs), log_probs(draft, inputs)
        accepted.append(torch.minimum(target_log_probs, draft_log_probs).exp().sum(-1).mean())
        agree.append((target_log_probs.argmax(-1) == draft_log_probs.argmax(-1)).float().mean())
        losses.append(-target_log_probs.gather(-1, labels).mean())
        draft_losses.append(-draft_log_probs.gather(-1, labels).mean())
    names = "acceptance", "greedy_agreement", "target_loss", "draft_loss"
    return {
        name: round(torch.stack(values).mean().item(), 4)
        for name, values in zip(names, (accepted, agree, losses, draft_losses), strict=True)
    }


def held_out_windows(tokenizer: Tokenizer, length: int = 256, limit: int = 64) -> torch.Tensor:
    """Text that neither model saw, cut into windows: [num_windows, length + 1] int64, at most ``limit`` of them."""
    tokens = encode(tokenizer, documents()[1])
    count = min(limit, (len(tokens) - 1) // length)
    return tokens[(torch.arange(count) * length)[:, None] + torch.arange(length + 1)]


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """A sample at temperature 1 that stops at the end of the document."""
    random = torch.Generator().manual_seed(SEED)
    ids = encode(tokenizer, [prompt])
    for _ in range(num_tokens):
        probs = log_probs(model, ids[None])[0, -1].exp()
        token = torch.multinomial(probs, 1, generator=random)
        if int(token) == tokenizer.token_to_id(END_OF_TEXT):
            break
        ids = torch.cat([ids, token])
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))

"""The two models and how they learn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from tiny_pair.text import END_OF_TEXT, NUM_TOKENS

SEED = 20240607
# Embedding rows beyond the tokenizer's entries are padding. The two models pad differently on purpose, as real families
# of models do: a server must neither refuse the pair nor sample the padding.
TARGET_ROWS, DRAFT_ROWS = 1536, 1600
TARGET_CONTEXT, DRAFT_CONTEXT = 1024, 512

TARGET_SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
DRAFT_SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
TARGET_STEPS, DRAFT_STEPS, TOKENS_PER_STEP = 560, 300, 2048
MUON_LR, ADAM_LR = 0.02, 4e-3


def make_model(tokenizer: Tokenizer, rows: int, context: int, shape: dict[str, int]) -> Qwen2ForCausalLM:
    end = tokenizer.token_to_id(END_OF_TEXT)
    config = Qwen2Config(
        vocab_size=rows,
        max_position_embeddings=context,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        **shape,
    )
    return Qwen2ForCausalLM(config)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, for the matrices inside the layers, in float32.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. It reaches the same loss on about half the text that
    AdamW needs here.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                momentum.mul_(0.95).add_(parameter.grad)
                update = orthogonalised(parameter.grad + 0.95 * momentum)
                scale = max(1.0, parameter.size(0) / parameter.size(1)) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:  # [rows, columns]
    """Nearly the closest orthogonal matrix: five Newton-Schulz steps with Muon's coefficients."""
    wide = matrix.size(0) <= matrix.size(1)
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.T


def train(
    name: str,
    model: Qwen2ForCausalLM,
    num_steps: int,
    context: int,
    tokens: torch.Tensor,  # [num_tokens] int64
    loss_of: Callable[
        [torch.Tensor], torch.Tensor
    ],  # windows [batch, length + 1] int64 -> mean loss per token, in nats
) -> None:
    """Random windows, warm-up and decay; the last fifth of the steps fills the whole context."""
    named = list(model.named_parameters())
    inner = [parameter for key, parameter in named if parameter.dim() == 2 and "embed" not in key]
    outer = [parameter for key, parameter in named if parameter.dim() != 2 or "embed" in key]
    optimizers = [Muon(inner, MUON_LR), torch.optim.AdamW(outer, ADAM_LR, betas=(0.9, 0.95), weight_decay=0.01)]
    schedule = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step / num_steps))
        for optimizer in optimizers
    ]
    random = torch.Generator().manual_seed(SEED)
    started = time.monotonic()
    for step in range(num_steps):
        length = context if step >= 0.8 * num_steps else 256
        starts = torch.randint(len(tokens) - length - 1, (TOKENS_PER_STEP // length,), generator=random)
        loss = loss_of(tokens[starts[:, None] + torch.arange(length + 1)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedule, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step % 20 == 0 or step == num_steps - 1:
            seconds = time.monotonic() - started
            print(f"{name} step {step:4d}/{num_steps}  loss {loss.item():.3f}  {seconds:5.0f} s", flush=True)


def learning_rate_factor(progress: float) -> float:
    """Warm-up over 3 % of the steps, then constant, then a linear decay over the second half."""
    return min(1.0, 0.02 + progress / 0.03, 0.02 + (1.0 - progress) / 0.5)


def log_probs(model: Qwen2ForCausalLM, inputs: torch.Tensor) -> torch.Tensor:  # [batch, length] int64
    """Next-token log-probabilities over the tokenizer's entries: [batch, length, NUM_TOKENS]."""
    return functional.log_softmax(model(inputs, use_cache=False).logits[..., :NUM_TOKENS], dim=-1)


def train_pair(tokenizer: Tokenizer, tokens: torch.Tensor) -> tuple[Qwen2ForCausalLM, Qwen2ForCausalLM]:
    """The target on the text, then the draft on the target's distributions over the text (forward KL)."""
    target = make_model(tokenizer, TARGET_ROWS, TARGET_CONTEXT, TARGET_SHAPE)
    draft = make_model(tokenizer, DRAFT_ROWS, DRAFT_CONTEXT, DRAFT_SHAPE)

    # Both losses see the padding rows, so that these learn to be unlikely, as in real models.
    def target_loss(windows: torch.Tensor) -> torch.Tensor:
        logits = target(windows[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def draft_loss(windows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = log_probs(target, windows[:, :-1]).exp()
        student = functional.log_softmax(draft(windows[:, :-1], use_cache=False).logits, dim=-1)[..., :NUM_TOKENS]
        return -(teacher * student).sum(-1).mean()

    train("target", target, TARGET_STEPS, TARGET_CONTEXT, tokens, target_loss)
    target.eval()
    train("draft", draft, DRAFT_STEPS, DRAFT_CONTEXT, tokens, draft_loss)
    return target, draft.eval()

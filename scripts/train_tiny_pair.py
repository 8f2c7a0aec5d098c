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
import ast
import hashlib
import importlib
import json
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

FOLDER = Path(__file__).resolve().parent.parent / "models" / "tiny"
SEED = 20240607

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_TOKENS = 1500
# Embedding rows beyond the tokenizer's entries are padding. The two models pad differently on purpose, as real families
# of models do: a server must neither refuse the pair nor sample the padding.
TARGET_ROWS, DRAFT_ROWS = 1536, 1600
TARGET_CONTEXT, DRAFT_CONTEXT = 1024, 512

TARGET_SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
DRAFT_SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
TARGET_STEPS, DRAFT_STEPS, TOKENS_PER_STEP = 560, 300, 2048
MUON_LR, ADAM_LR = 0.02, 4e-3

# The pattern of GPT-2 with single digits, and runs of spaces kept together for indented text.
SPLIT = r"'(?i:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SKIPPED_PACKAGES = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}


# ---------------------------------------------------------------------------------------------------------------- text


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


# ------------------------------------------------------------------------------------------------------------ training


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


# --------------------------------------------------------------------------------------------------------- measurement


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


# --------------------------------------------------------------------------------------------------------------- files


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

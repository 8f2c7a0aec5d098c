"""The oracle: what transformers says that each token's distribution is, given the text before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.exactness.processors import Borders, logits_processors, processed, warped
from outrider.exactness.rows import Rows

GRAMMARS = ("json_schema", "regex", "ebnf")
# What the oracle knows how to apply; the rest of what a request may say changes no distribution.
JUDGED = frozenset(
    (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "banned_token_ids",
        "min_tokens",
        *GRAMMARS,
    )
)
# Says nothing about distributions, or is what the harness chooses itself.
NOT_JUDGED = frozenset(
    (
        "max_tokens",
        "seed",
        "verifier",
        "n",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop",
        "logprobs",
        "prompt_logprobs",
        "logprobs_mode",
        "num_speculative_tokens",
        "timeout",
        "controls",
    )
)


def require_known(settings: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` where settings of a request, by the client's names, are none that the oracle can judge."""
    unknown = (set(settings) | set(settings.get("controls") or {})) - JUDGED - NOT_JUDGED
    if unknown:
        raise ConfigError(f"check-exactness has no oracle for {', '.join(sorted(unknown))}")


# Entries of rows that are handled at once: some float64 copies of them are made.
MAX_ENTRIES = 1 << 22


class Oracle:
    """The target model, and the draft's where it is named, under the settings of the requests.

    Attributes:
        tokenizer: transformers'.
        vocab_size: tokens that may be sampled; rows of the embedding behind them are padding.
        eos_token_ids: tokens at which the model ends a text.
    """

    def __init__(self, model: Path, settings: Mapping[str, Any], *, draft: Path | None = None) -> None:
        """``settings`` must be known (``require_known``). Raises ``ConfigError`` for a folder that cannot be read."""
        from transformers import AutoTokenizer

        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._settings |= self._settings.pop("controls", {})
        if not (model / "config.json").is_file():
            raise ConfigError(f"--model: {model} holds no config.json, so it is no model folder in Hugging Face format")
        self._model = _load(model)
        self._draft = _load(draft) if draft is not None else None
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.eos_token_ids = _eos_token_ids(self._model, self.tokenizer)
        self._bad_words_ids = self._spelt(self._settings.get("bad_words") or ())
        self._grammar = _Grammar.of(self._settings, model, self.vocab_size, self.eos_token_ids)

    @property
    def is_greedy(self) -> bool:
        return float(self._settings.get("temperature", 1.0)) == 0.0

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens, as the model expects a plain text."""
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def rows(self, prompt: Sequence[int], output: Sequence[int]) -> Iterator[Rows]:
        """The rows of the output's tokens, some at a time: one pass over the text, then the controls row by row.

        At temperature 0 there is nothing to draw: the scores are those that the most likely token is chosen by.
        """
        text = torch.tensor([*prompt, *output])
        raw = self._logits(self._model, prompt, output)
        theirs = None if self._draft is None else self._logits(self._draft, prompt, output)
        ours = self._processors(len(prompt))
        for_draft = self._processors(len(prompt))  # grammars follow one text each
        step = max(1, MAX_ENTRIES // self.vocab_size)
        for start in range(0, len(output), step):
            part = raw[start : start + step]
            first = len(prompt) + start
            scores = _processed(ours, part, text, first)
            if self.is_greedy:
                none = torch.zeros(len(part), dtype=torch.float64)
                yield Rows(start, part, scores, Borders(~torch.isneginf(scores), none))
                continue
            scores, borders = warped(self._settings, scores)
            draft = None
            if theirs is not None:
                draft = _processed(for_draft, theirs[start : start + step], text, first)
                draft /= float(self._settings.get("temperature", 1.0))
            yield Rows(start, part, scores, borders, draft)

    def prompt_log_probs(self, prompt: Sequence[int]) -> Tensor:
        """[len(prompt) - 1, V] float64: the model's own, of each token of the prompt but the first."""
        return torch.log_softmax(self._logits(self._model, prompt[:1], prompt[1:]).double(), dim=-1)

    def _logits(self, model: Any, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """[T, V] float32."""
        tokens = torch.tensor([[*prompt, *output]], device=model.device)
        with torch.inference_mode():
            logits = model(tokens, logits_to_keep=len(output) + 1).logits[0, :-1, : self.vocab_size]
        return logits.float().cpu().clone()

    def _processors(self, prompt_len: int) -> list[Any]:
        return logits_processors(
            self._settings,
            prompt_len=prompt_len,
            end_token_ids=self._end_token_ids(),
            bad_words_ids=self._bad_words_ids,
            allowed=self._grammar.follower(prompt_len) if self._grammar is not None else None,
        )

    def _end_token_ids(self) -> list[int]:
        own = () if self._settings.get("ignore_eos") else self.eos_token_ids
        return sorted({*own, *(self._settings.get("stop_token_ids") or ())})

    def _spelt(self, words: str | Sequence[str]) -> list[list[int]]:
        """Each word bare and with a space before."""
        spelt = []
        for word in [words] if isinstance(words, str) else words:
            for text in (word.lstrip(), " " + word.lstrip()):
                spelt.append(self.tokenizer.encode(text, add_special_tokens=False))
        return spelt


class _Grammar:
    """llguidance, asked anew for each text: token by token from the start, nothing taken back."""

    def __init__(self, source: str, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        self._source = source
        self._vocab_size = vocab_size
        text = (model / "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    @staticmethod
    def of(settings: Mapping[str, Any], model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> _Grammar | None:
        import json

        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark

        kind = next((kind for kind in GRAMMARS if kind in settings), None)
        if kind is None:
            return None
        text = settings[kind]
        if kind == "json_schema":
            text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
            # Compact JSON, as docs/exactness.md says.
            source = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        elif kind == "regex":
            source = LLMatcher.grammar_from_regex(text)
        else:
            source = LLMatcher.grammar_from_lark(gbnf_to_lark(text) if "::=" in text else text)
        return _Grammar(source, model, vocab_size, eos_token_ids)

    def follower(self, prompt_len: int) -> Callable[[Tensor], list[int]]:
        """What is allowed after a prefix; to be asked about the prefixes of one text in turn."""
        import numpy as np
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._source, log_level=0)
        followed = 0

        def allowed(prefix: Tensor) -> list[int]:
            nonlocal followed
            new = prefix[prompt_len + followed :].tolist()
            followed += len(new)
            # Where the text has left its grammar, that token was found impossible; the rest is not judged by it.
            if new and not matcher.consume_tokens(new):
                return list(range(self._vocab_size))
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            tokens: list[int] = np.flatnonzero(np.unpackbits(bits, count=self._vocab_size, bitorder="little")).tolist()
            return tokens

        return allowed


def _processed(processors: list[Any], raw: Tensor, text: Tensor, first: int) -> Tensor:
    """[T, V] float32: rows of the tokens from ``first`` on in the text, each after its own prefix; a new tensor."""
    if not processors:
        return raw.clone()
    return torch.stack([processed(processors, text[: first + t], row) for t, row in enumerate(raw)])


def _load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().to(device)
    finally:
        if shown:
            enable_progress_bar()


def _eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.eos_token_id if model.config.eos_token_id is not None else tokenizer.eos_token_id
    if ids is None:
        return []
    return sorted(ids) if isinstance(ids, list) else [int(ids)]

"""A language model whose next token is a hash of the prefix, and the model folder that goes with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.core.fingerprint import tokenizer_fingerprint
from outrider.core.prefix import HashedTokens

NUM_BYTES = 256
EOS = 256  # <|end|>
VOCAB_SIZE = 258  # one token for each byte, <|end|> and <|user|>
LETTERS = tuple(b"abcdefgh ")


@dataclass(frozen=True)
class ToyModel:
    """Knows what comes next.

    Attributes:
        alphabet: the tokens that it says.
        script: tokens that stand at given positions (of prompt + output) whatever came before.
    """

    alphabet: tuple[int, ...] = LETTERS
    script: Mapping[int, int] = field(default_factory=dict)

    def next_token(self, prefix_hash: int, length: int, choice: int = 0) -> int:
        """The token after a prefix of that length and chained hash (``outrider.core.prefix``).

        The model has no temperature: only the choices of one request differ.
        """
        if length in self.script:
            return self.script[length]
        return self.alphabet[((prefix_hash >> 7) + choice) % len(self.alphabet)]

    def logits(self, prefix_hash: int, length: int, choice: int = 0) -> list[float]:
        """One for each token: half a point less from rank to rank, ``next_token`` first and the end of text last."""
        first = self.next_token(prefix_hash, length, choice)
        start = (prefix_hash >> 7) + choice
        letters = [self.alphabet[(start + step) % len(self.alphabet)] for step in range(len(self.alphabet))]
        ranking = dict.fromkeys([first, *letters, *(token for token in range(VOCAB_SIZE) if token != EOS), EOS])
        scores = {token: -0.5 * rank for rank, token in enumerate(ranking)}
        return [scores[token] for token in range(VOCAB_SIZE)]

    def output(self, prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
        """The ``count`` tokens that follow a prompt."""
        text = HashedTokens(prompt)
        for _ in range(count):
            text.extend([self.next_token(text.hashes[-1], len(text), choice)])
        return text.tokens[len(prompt) :]

    def saying(self, text: str, prompt_len: int, *, end: bool = False) -> ToyModel:
        """The same model, but its output after a prompt of that length begins with a text (and then ends)."""
        said = [*text.encode(), *([EOS] if end else [])]
        return replace(self, script={**self.script, **dict(enumerate(said, prompt_len))})


def write_toy_model(folder: Path, *, chat: bool = True, rename: str = "") -> Path:
    """Write a model folder without weights: byte-level tokens, ids 0 to 255 being the bytes, then two special ones.

    ``rename`` changes the name of the last token, and with it the fingerprint.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken(f"<|user{rename}|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS, "vocab_size": VOCAB_SIZE}))
    if chat:
        template = "{% for message in messages %}<|user|>{{ message.content }}\n{% endfor %}"
        (folder / "chat_template.jinja").write_text(template)
    return folder


def toy_fingerprint(folder: Path) -> str:
    """Fingerprint of a folder that ``write_toy_model`` wrote."""
    return tokenizer_fingerprint(folder)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = [], 0
    for byte in range(NUM_BYTES):
        if byte in printable:
            table.append(chr(byte))
        else:
            table.append(chr(NUM_BYTES + extra))
            extra += 1
    return table

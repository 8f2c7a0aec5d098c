"""A language model whose next token is a hash of the prefix, and the model folder that goes with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.core.fingerprint import tokenizer_fingerprint
from outrider.core.prefix import extend_hash, hash_tokens

NUM_BYTES = 256
EOS = 256  # <|end|>
VOCAB_SIZE = 258  # one token for each byte, <|end|> and <|user|>
LETTERS = tuple(b"abcdefgh ")


@dataclass(frozen=True)
class ToyModel:
    """Knows what comes next.

    Attributes:
        alphabet: the tokens that it may say.
        script: output tokens that it says first, whatever the prompt.
    """

    alphabet: tuple[int, ...] = LETTERS
    script: tuple[int, ...] = field(default=())

    def next_token(self, prefix: Sequence[int], prompt_len: int) -> int:
        """The token after ``prefix``, of which the first ``prompt_len`` tokens are the prompt."""
        return self.continue_from(hash_tokens(prefix), len(prefix), prompt_len)

    def continue_from(self, prefix_hash: int, length: int, prompt_len: int) -> int:
        """The same from the chained hash of a prefix (``outrider.core.prefix``)."""
        if 0 <= length - prompt_len < len(self.script):
            return self.script[length - prompt_len]
        return self.alphabet[(prefix_hash >> 7) % len(self.alphabet)]

    def output(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that follow a prompt."""
        prefix_hash, tokens = hash_tokens(prompt), []
        for index in range(count):
            tokens.append(self.continue_from(prefix_hash, len(prompt) + index, len(prompt)))
            prefix_hash = extend_hash(prefix_hash, tokens[-1])
        return tokens


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

"""What a draft and a target must have in common: the table from token ids to tokens.

``tokenizers`` is imported when a function is called, so that processes without it may import this module.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path

from outrider.core.errors import ConfigError


def vocab_fingerprint(vocab: Mapping[str, int]) -> str:
    """SHA-256, in hex, over the (id, token) pairs in order of id; ``vocab`` maps tokens to ids, added tokens included.

    Each pair goes in as id and length of the token in bytes (both 64-bit little-endian) followed by its UTF-8.
    """
    digest = hashlib.sha256()
    for token_id, token in sorted((token_id, token) for token, token_id in vocab.items()):
        # A lone surrogate cannot come from a valid file, but must not turn into an error about encodings here.
        data = token.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<QQ", token_id, len(data)))
        digest.update(data)
    return digest.hexdigest()


def vocab_size(vocab: Mapping[str, int]) -> int:
    """Ids run from 0 to this number less one. Embedding rows beyond are padding."""
    return max(vocab.values()) + 1


def read_vocab(model_dir: str | Path) -> dict[str, int]:
    """The table of ``tokenizer.json``, added tokens included. Raises ``ConfigError`` naming the file."""
    from tokenizers import Tokenizer

    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"the model folder {model_dir} holds no tokenizer.json")
    try:
        vocab: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception for every fault of a file
        raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error
    if not vocab:
        raise ConfigError(f"the tokenizer {path} has no tokens")
    return vocab


def tokenizer_fingerprint(model_dir: str | Path) -> str:
    """SHA-256, in hex, of the token table in a model's folder. Raises ``ConfigError`` if it cannot be read."""
    return vocab_fingerprint(read_vocab(model_dir))


def tokenizer_vocab_size(model_dir: str | Path) -> int:
    """Number of ids that may be sampled. Raises ``ConfigError`` if the tokenizer cannot be read."""
    return vocab_size(read_vocab(model_dir))

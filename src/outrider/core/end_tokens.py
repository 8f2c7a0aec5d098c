"""Which tokens end a text, as a model's folder says. Router and workers must agree on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError


def end_token_ids(model_dir: str | Path, vocab: Mapping[str, int]) -> frozenset[int]:
    """What the first of generation_config.json, config.json and tokenizer_config.json names that names any, as in
    transformers; may be empty.

    Args:
        vocab: from token to id.

    Raises:
        ConfigError: one of the files cannot be read.
    """
    folder = Path(model_dir)
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(folder / name).get("eos_token_id")
        if isinstance(value, int):
            return frozenset([value])
        if isinstance(value, list) and value:
            return frozenset(int(token_id) for token_id in value)
    token = read_json_object(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    token_id = vocab.get(token) if isinstance(token, str) else None
    return frozenset() if token_id is None else frozenset([token_id])


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file of a model's folder; empty if there is no such file. Raises ``ConfigError``."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return data

"""Router and workers read which tokens end a text from the same places, in the same order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.core.end_tokens import end_token_ids
from outrider.core.errors import ConfigError

VOCAB = {"a": 1, "<end>": 7, "<stop>": 9}


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 0}}, {0}),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "<end>"}}, {7}),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [4, 5]}}, {4, 5}),
        ({"config": {"eos_token_id": [3]}, "generation_config": {"eos_token_id": []}}, {3}),
        ({"tokenizer_config": {"eos_token": {"content": "<stop>"}}}, {9}),
        ({"tokenizer_config": {"eos_token": "<unheard of>"}}, set()),
    ],
)
def test_the_first_file_that_names_any_counts(tmp_path: Path, files: dict[str, object], expected: set[int]) -> None:
    assert end_token_ids(write(tmp_path, **files), VOCAB) == expected


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        end_token_ids(tmp_path, VOCAB)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        end_token_ids(tmp_path, VOCAB)

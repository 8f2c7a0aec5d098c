"""Mistakes in models and ports are named in one line before anything starts."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.checks import check_models, check_router_port
from outrider.cluster.config import ClusterConfig
from outrider.core.errors import ConfigError
from outrider.core.fingerprint import tokenizer_fingerprint

VOCAB = {"a": 0, "b": 1, "c": 2}


def model_folder(path: Path, vocab: Mapping[str, int] = VOCAB, **config: Any) -> Path:
    from tokenizers import Tokenizer, models

    path.mkdir(parents=True)
    Tokenizer(models.WordLevel(dict(vocab), unk_token="a")).save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"vocab_size": len(vocab), **config}))
    (path / "model.safetensors").write_bytes(b"")
    return path


def settings(target: Path, draft: Path, **target_fields: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {"target": {"model": str(target), **target_fields}, "drafts": [{"model": str(draft)}]}
    )


def refusal(config: ClusterConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_models(config)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_m1_different_tokenizers_are_refused_with_both_fingerprints(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "target")
    draft = model_folder(tmp_path / "draft", {"a": 0, "c": 1, "b": 2})
    line = refusal(settings(target, draft))
    assert line.startswith("drafts.0.model")
    assert tokenizer_fingerprint(target) in line
    assert tokenizer_fingerprint(draft) in line
    assert tokenizer_fingerprint(target) != tokenizer_fingerprint(draft)


def test_m2_different_padding_is_allowed(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "target", vocab_size=128)
    draft = model_folder(tmp_path / "draft", vocab_size=192)
    check_models(settings(target, draft))


def test_a_missing_folder_and_missing_files_are_named(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "target")
    missing = tmp_path / "nowhere"
    assert refusal(settings(missing, target)) == f"target.model: the model folder {missing} does not exist"
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        draft = model_folder(tmp_path / f"without-{name}")
        (draft / name).unlink()
        line = refusal(settings(target, draft))
        assert line.startswith("drafts.0.model")
        assert ("weights" if name == "model.safetensors" else name) in line


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "target", max_position_embeddings=64)
    check_models(settings(target, target, max_model_len=64))
    assert refusal(settings(target, target, max_model_len=65)).startswith("target.max_model_len is 65")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        data = {"target": {"model": "/m"}, "router": {"port": port}}
        with pytest.raises(ConfigError, match=rf"router\.port.*127\.0\.0\.1:{port}"):
            check_router_port(ClusterConfig.model_validate(data))
    check_router_port(ClusterConfig.model_validate(data))


def test_an_unknown_host_is_named() -> None:
    data = {"target": {"model": "/m"}, "router": {"host": "no-such-host.invalid"}}
    with pytest.raises(ConfigError, match=r"router\.host"):
        check_router_port(ClusterConfig.model_validate(data))

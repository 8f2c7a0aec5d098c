"""Settings are checked when they are read; each mistake is one line that names the field."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.cluster.config import load_config, parse_config
from outrider.core.errors import ConfigError


def refusal(text: str, base: Path = Path("/base")) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, base=base, source="file.yaml")
    line = str(caught.value)
    assert "\n" not in line
    assert "file.yaml" in line
    return line


def with_target(**fields: Any) -> str:
    return yaml.safe_dump({"target": {"model": "m", **fields}})


def test_the_defaults_are_one_rank_no_draft_and_a_free_port() -> None:
    config = parse_config("target: {model: models/m}", base=Path("/base"))
    assert config.target.model == "/base/models/m"
    assert config.target.tensor_parallel_size == 1
    assert config.drafts == ()
    assert (config.router.host, config.router.port) == ("127.0.0.1", 0)
    assert (config.redis.url, config.ray.address) == (None, None)


@pytest.mark.parametrize(("of_target", "of_router", "expected"), [(8, None, 8), (8, 3, 3), (200, 200, 200)])
def test_how_many_requests_run_at_once(of_target: int, of_router: int | None, expected: int) -> None:
    text = yaml.safe_dump({"target": {"model": "m", "max_num_seqs": of_target}, "router": {"max_num_seqs": of_router}})
    assert parse_config(text, base=Path("/base")).max_num_seqs == expected


def test_environment_variables_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/store")
    config = parse_config("target: {model: '${MODELS}/a'}\ndrafts: [{model: '${MODELS}/b'}]", base=Path("/base"))
    assert config.target.model == "/store/a"
    assert config.drafts[0].model == "/store/b"
    monkeypatch.delenv("MODELS")
    assert "${MODELS}" in refusal("target: {model: '${MODELS}/a'}")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("target: {}", "target.model"),
        (with_target(tensor_parallel_size=0), "target.tensor_parallel_size"),
        (with_target(dtype="int3"), "target.dtype"),
        (with_target(quantization="int3"), "target.quantization"),
        (with_target(quantization_group_size=32), "quantization is not"),
        (with_target(activation_dtype="float16"), "target.activation_dtype"),
        (with_target(activation_dtype="bfloat16"), "dtype is float32 and quantization is not"),
        (with_target(kv_cache_dtype="int8"), "target.kv_cache_dtype"),
        (with_target(tensor_paralel_size=2), "target.tensor_paralel_size"),
        ("target: {model: m}\ndrafts: [{model: d, placement: moon}]", "drafts.0.placement"),
        ("target: {model: m}\ndrafts: [{model: d}, {model: d}]", "a name of its own"),
        ("target: {model: m}\ncluster: 'Not A Name'", "cluster"),
        ("target: {model: m}\nrouter: {port: 70000}", "router.port"),
        ("target: {model: m}\nspeculation: {num_speculative_tokens: -1}", "speculation.num_speculative_tokens"),
        ("target: {model: m, max_num_seqs: 8}\nrouter: {max_num_seqs: 9}", "router.max_num_seqs is 9"),
        ("- a list", "mapping"),
        ("target: [", "not YAML"),
        ("", "mapping"),
    ],
)
def test_mistakes_are_named(text: str, field: str) -> None:
    assert field in refusal(text)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="/no/such/file"):
        load_config(Path("/no/such/file"))


def test_settings_survive_being_written_and_read_again() -> None:
    config = parse_config("target: {model: m, num_threads: 2}\ndrafts: [{model: d, replicas: 2}]", base=Path("/base"))
    again = parse_config(yaml.safe_dump(config.model_dump(mode="json")), base=Path("/elsewhere"))
    assert again == config


@pytest.mark.parametrize(
    "rest",
    [
        "target: {model: m, max_num_seqs: 8}\nrouter: {max_num_seqs: 9}",  # of the whole file
        "target: {model: m}\ndrafts: [{model: d}, {model: d}]",
        "cluster: c",  # without a target
        "target: {model: m}\nredis_url: 'redis://:secret@h'",
        "target: {model: m}\nrouter: {api_key: secret}",
        "target: {model: m}\nrouter: {port: {api_key: secret}}",
        "target: {model: m}\nredis: ['redis://:secret@h']",
        "target: {model: m}\nredis: {url: redis://:secret@h, usernam: u}",
        "target: {model: m}\nredis: {url: redis://:secret@h, password_file: p}",
        "redis: {url: redis://:secret@h",  # no YAML
        "redis: {url: 'redis://:secret@h}",
        "redis: {url: @secret}",
    ],
)
def test_no_mistake_shows_a_password(rest: str) -> None:
    text = rest if "redis:" in rest else f"redis: {{url: 'redis://:secret@h'}}\n{rest}"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, base=Path("/base"))
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_a_mistake_shows_what_was_given_and_where() -> None:
    assert "target.dtype: " in refusal(with_target(dtype="int3"))
    assert refusal(with_target(dtype="int3")).endswith("(got 'int3')")
    assert "line 2" in refusal("target: {model: m}\nrouter: [")

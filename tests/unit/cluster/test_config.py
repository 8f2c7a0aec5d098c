"""Settings files: what is read, and the one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cluster.config import ClusterConfig, load_config, parse_config
from outrider.core.errors import ConfigError

BASE = Path("/models/settings")


def parse(text: str) -> ClusterConfig:
    return parse_config(text, base=BASE, source="s.yaml")


def test_the_smallest_file_is_enough() -> None:
    config = parse("target: {model: tiny}")
    assert config.target.model == "/models/settings/tiny"
    assert config.target.tensor_parallel_size == 1
    assert config.drafts == ()
    assert config.speculation.num_speculative_tokens == 4
    assert config.speculation.verifier == "coupled"


def test_model_paths_start_from_the_files_folder() -> None:
    config = parse("{target: {model: ../a}, drafts: [{model: /b}]}")
    assert (config.target.model, config.drafts[0].model) == ("/models/a", "/b")


def test_environment_variables_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TEST_MODELS", "/m")
    config = parse("target: {model: '${OUTRIDER_TEST_MODELS}/big'}")
    assert config.target.model == "/m/big"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse("target: {model: a}").target.model = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold a mapping"),
        ("- a", "must hold a mapping"),
        ("target: [", "is not YAML"),
        ("{}", "target: Field required"),
        ("target: {}", "target.model: Field required"),
        ("target: {model: a, modell: b}", "target.modell: Extra inputs are not permitted (got 'b')"),
        ("target: {model: a, tensor_parallel_size: 0}", "target.tensor_parallel_size"),
        ("target: {model: a, dtype: int8}", "target.dtype"),
        ("target: {model: a, step_timeout_s: 0}", "target.step_timeout_s"),
        ("{target: {model: a}, drafts: [{model: b, top_m: 0}]}", "drafts.0.top_m"),
        ("{target: {model: a}, drafts: [{model: b, name: A_B}]}", "drafts.0.name"),
        ("{target: {model: a}, drafts: [{model: b}, {model: c}]}", "each needs a name of its own"),
        ("{target: {model: a}, router: {port: 70000}}", "router.port"),
        ("{target: {model: a}, speculation: {num_speculative_tokens: -1}}", "speculation.num_speculative_tokens"),
        ("{target: {model: a}, speculation: {verifier: greedy}}", "speculation.verifier"),
        ("{target: {model: a}, cluster: 'no spaces'}", "cluster"),
        ("target: {model: '${OUTRIDER_TEST_UNSET}'}", "OUTRIDER_TEST_UNSET}, but that environment variable is not set"),
    ],
)
def test_mistakes_are_told_in_one_line_that_names_the_field(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("s.yaml")


@pytest.mark.parametrize(
    "text", ["{target: {model: a}, drafts: 3}", "{target: a}", "{target: {model: 3}, drafts: {a: b}}"]
)
def test_wrong_shapes_are_mistakes_too(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings file .*none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("target: {model: m}\n")
    assert load_config(path).target.model == str(tmp_path / "m")

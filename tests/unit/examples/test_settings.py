"""The settings files of ``examples``: each is read as it is, and says what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cluster.config import ClusterConfig, load_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path))


def read(name: str) -> ClusterConfig:
    return load_config(EXAMPLES / f"{name}.yaml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_is_read(path: Path) -> None:
    assert load_config(path).cluster


@pytest.mark.parametrize("name", ["tiny", "coder-pair"])
def test_two_ranks_and_a_draft_on_another_node(name: str) -> None:
    config = read(name)
    assert (config.target.dtype, config.target.tensor_parallel_size) == ("float32", 2)
    assert [draft.placement for draft in config.drafts] == ["remote"]


def test_the_pair_is_one_rank_in_bfloat16_with_a_draft_in_int8() -> None:
    config = read("coder-pair-bf16")
    assert (config.target.dtype, config.target.tensor_parallel_size) == ("bfloat16", 1)
    assert [draft.quantization for draft in config.drafts] == ["int8"]


def test_lookup_and_int8_have_the_target_of_the_pair_and_no_draft() -> None:
    pair, lookup, int8 = read("coder-pair-bf16"), read("coder-lookup-bf16"), read("coder-int8")
    assert lookup.target == pair.target
    assert lookup.drafts == int8.drafts == ()
    assert lookup.speculation.lookup_lengths is not None
    assert pair.speculation.lookup_lengths is int8.speculation.lookup_lengths is None
    assert int8.target.quantization == "int8"
    assert int8.target.model == pair.target.model

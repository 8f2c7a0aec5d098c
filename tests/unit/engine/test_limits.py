"""What does not fit is refused in one line that names the setting and its limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from outrider.core.errors import ConfigError, GroupError
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.kv_cache import default_num_blocks
from outrider.workers.engine.loading import read_model_config
from outrider.workers.engine.parallel import Parallel, interface_of
from outrider_ports import held_port


@pytest.fixture(scope="module")
def engine(models: dict[str, str], scenarios: ModuleType) -> Engine:
    found: Engine = scenarios.make_engine(models["llama"], max_model_len=64, max_num_batched_tokens=32)
    return found


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "max_num_seqs"),
        ([SequenceRows([1], 0, [0])] * 17, "max_num_seqs"),
        ([SequenceRows([1] * 33, 0, list(range(16)))], "max_num_batched_tokens"),
        ([SequenceRows([], 0, [0])], "nothing to run"),
        ([SequenceRows([1], -1, [0])], "nothing to run"),
        ([SequenceRows([1, 1], 63, list(range(32)))], "max_model_len is 64"),
        ([SequenceRows([1] * 5, 0, [3])], "block_table has 1"),
        ([SequenceRows([1], 0, [320])], "ids from 0 to 319"),
        ([SequenceRows([1], 0, [-1])], "ids from 0 to 319"),
        ([SequenceRows([304], 0, [0])], "0 to 303"),
        ([SequenceRows([-1], 0, [0])], "0 to 303"),
        ([SequenceRows([1], 0, [0], [1])], "logits_rows"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(engine: Engine, rows: list[SequenceRows], words: str) -> None:
    before = engine.read_kv(range(320), 1280)
    with pytest.raises(ConfigError, match=words):
        engine.forward(rows)
    for (keys, values), (kept_keys, kept_values) in zip(engine.read_kv(range(320), 1280), before, strict=True):
        torch.testing.assert_close(keys, kept_keys, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(values, kept_values, rtol=0, atol=0, equal_nan=True)


def test_no_rows_wanted_is_fine(engine: Engine) -> None:
    hidden = engine.forward([SequenceRows([1, 2], 0, [0])])
    assert hidden.shape == (0, 64)
    assert engine.local_logits(hidden).shape == (0, 300)


def refused(words: str, make_engine: Callable[..., Engine], model: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_engine(model, **settings)
    assert "\n" not in str(caught.value)


def test_models_that_do_not_fit_are_refused(
    make_model: Callable[..., str], models: dict[str, str], scenarios: ModuleType, tmp_path: Path
) -> None:
    make = scenarios.make_engine
    refused("model: .* no config.json", make, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    refused("model: ", make, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    refused("not a causal language model", make, str(tmp_path))
    refused("max_model_len is 513, but .* has 512 positions", make, models["llama"], max_model_len=513)
    refused("num_kv_blocks 8 of block_size 4", make, models["llama"], max_model_len=64, num_kv_blocks=8)
    refused("at most 32", make, make_model("mistral", sliding_window=32), max_model_len=64)
    refused("rope_type dynamic", make, make_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}))
    refused("final_logit_softcapping", make, make_model("gemma2", head_dim=16))
    refused("embeds 296 tokens, but tokenizer.json has 300", make, make_model("llama", vocab_size=296))


def test_a_window_that_never_ends_early_is_fine(make_model: Callable[..., str], scenarios: ModuleType) -> None:
    engine = scenarios.make_engine(make_model("mistral", sliding_window=64), max_model_len=64)
    assert engine.max_model_len == 64


def test_heads_must_divide(models: dict[str, str]) -> None:
    from outrider.cluster.config import EngineConfig

    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but must divide the 2 key/value heads"):
        read_model_config(EngineConfig(model=models["llama"]), 4)


def test_a_small_cache_bounds_the_context(models: dict[str, str], scenarios: ModuleType) -> None:
    engine = scenarios.make_engine(models["llama"], num_kv_blocks=10)
    assert engine.max_model_len == 40


def test_default_number_of_blocks() -> None:
    plenty = 1 << 40
    assert default_num_blocks(64, 1024, 16, 1000, plenty, 1) == 64 * 8
    assert default_num_blocks(1, 1024, 16, 1000, plenty, 1) == 64  # one whole sequence at least
    assert default_num_blocks(64, 1024, 16, 1000, 1_000_000, 2) == 200  # 40 % of memory, shared by two ranks
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        default_num_blocks(64, 1024, 16, 1000, 10, 1)


def test_a_group_that_does_not_come_together_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with held_port() as port:
        place = {"local_size": 2, "master_addr": "127.0.0.1", "master_port": port, "node_ip": "127.0.0.1"}
        for rank in (0, 1):
            with pytest.raises(GroupError, match=f"rank {rank} of 2 found no group at 127.0.0.1"):
                Parallel.connect(rank=rank, world_size=2, timeout_s=1.0, **place)


def test_interfaces() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9"):
        interface_of("203.0.113.9")


def test_a_group_of_one() -> None:
    parallel = Parallel.single()
    tensor = torch.ones(3)
    parallel.all_reduce(tensor)
    parallel.barrier()
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert parallel.broadcast_ints([3, -1]) == [3, -1]
    assert torch.equal(parallel.gather(tensor)[0], tensor)
    parallel.close()

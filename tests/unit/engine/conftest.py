"""Tiny random models on disk, and groups of ranks in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from outrider_ports import held_port
from outrider_testbed import WarmPython

HERE = Path(__file__).parent
VOCAB_SIZE = 300
PADDED_VOCAB_SIZE = 304
SIZES: dict[str, Any] = {
    "vocab_size": PADDED_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 80,  # no multiple of a vector length, halved neither
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = ("qwen2", "llama", "qwen3", "mistral")

ModelMaker = Callable[..., str]
GroupRunner = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def scenarios() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_scenarios", HERE / "scenarios.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """make_model(family, **config) -> folder of a tiny random model with a tokenizer.json"""

    def make(family: str, **overrides: Any) -> str:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = tmp_path_factory.mktemp(family)
        values = {**SIZES, **overrides}
        if family == "mistral":
            values.setdefault("sliding_window", None)
        config = AutoConfig.for_model(family, **values)
        torch.manual_seed(sum(family.encode()))
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)  # biases start as zeros, which would prove nothing
        model.save_pretrained(folder)
        Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0")).save(
            str(folder / "tokenizer.json")
        )
        return str(folder)

    return make


@pytest.fixture(scope="session")
def models(make_model: ModelMaker) -> dict[str, str]:
    """One model of each family; qwen2's embeddings are tied, the others' are not."""
    return {family: make_model(family, tie_word_embeddings=family == "qwen2") for family in FAMILIES}


@pytest.fixture(scope="session")
def run_group(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> GroupRunner:
    """run_group(world_size, local_size, **settings) -> what scenarios.py found on each rank"""

    def run(world_size: int, local_size: int, **settings: Any) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("group")
        with held_port() as port:
            ranks = []
            for rank in range(world_size):
                values = {"rank": rank, "world_size": world_size, "local_size": local_size, "port": port, **settings}
                values["out"] = str(folder / f"found{rank}")
                (folder / f"settings{rank}.json").write_text(json.dumps(values))
                arguments = [str(folder / f"settings{rank}.json")]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                with (folder / f"log{rank}").open("w") as log:
                    script = HERE / "scenarios.py"
                    ranks.append(warm_python.start(script, arguments, environment=environment, log=log, rank=rank))
            try:
                codes = [process.wait(timeout=200) for process in ranks]
            finally:
                for process in ranks:
                    process.kill()
                    process.wait(timeout=60)
        logs = "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(world_size))
        assert codes == [0] * world_size, logs
        return [torch.load(folder / f"found{rank}", weights_only=False) for rank in range(world_size)]

    return run

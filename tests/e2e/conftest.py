"""Real clusters for end-to-end tests: ``running_cluster`` is shared by a whole session, ``make_cluster`` starts others.

The models are the tiny pair of the repository, or a random pair of the same kind where that is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from outrider.client import Client
from outrider.core.errors import OutriderError
from outrider_collector import Collector

ROOT = Path(__file__).resolve().parents[2]
UP_TIMEOUT_S = 420.0  # a busy machine imports torch three times at once, and may have to build an operator
DOWN_TIMEOUT_S = 100.0
RUN_TIMEOUT_S = 120.0


@dataclass
class Cluster:
    """One cluster as a user has it: a settings file and a state folder."""

    name: str
    settings_file: Path
    environment: dict[str, str]
    # Words before each command, such as those that take it to another host.
    prefix: list[str] = field(default_factory=list)

    def outrider(
        self, *args: str, timeout_s: float = RUN_TIMEOUT_S, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line. Nothing is checked."""
        command = [*self.prefix, sys.executable, "-P", "-m", "outrider.cluster.cli", *args]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False, **options
        )

    def ok(self, *args: str, timeout_s: float = RUN_TIMEOUT_S, **options: Any) -> str:
        """Its standard output; it must succeed."""
        done = self.outrider(*args, timeout_s=timeout_s, **options)
        assert done.returncode == 0, f"outrider {' '.join(args)}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def refusal(self, *args: str, timeout_s: float = RUN_TIMEOUT_S, status: int = 1, **options: Any) -> str:
        """Its error; it must fail with exactly one line of it, after progress lines at most, and print no answer."""
        done = self.outrider(*args, timeout_s=timeout_s, **options)
        assert done.returncode == status, f"outrider {' '.join(args)}: {done.returncode} {done.stdout} {done.stderr}"
        assert done.stdout == ""
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr
        assert done.stderr.splitlines()[-1] == errors[0]
        assert "Traceback" not in done.stderr
        return errors[0]

    def up(self) -> None:
        self.ok("up", "-f", str(self.settings_file), "--detach", timeout_s=UP_TIMEOUT_S)

    def down(self) -> None:
        self.ok("down", timeout_s=DOWN_TIMEOUT_S)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ok("status", "--json"))
        return answer

    def peek(self) -> dict[str, Any] | None:
        """What the router answers to ``status``; None where none does. For waiting: a command each time would keep a
        core busy that those who are waited for need."""
        if self.prefix:  # the router's address may lead nowhere from here
            done = self.outrider("status", "--json")
            return json.loads(done.stdout) if done.returncode == 0 else None
        try:
            with Client(self.address, timeout=10.0) as client:
                return client.status()
        except (OutriderError, FileNotFoundError):
            return None

    def generate(self, prompt: str, *args: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ok("generate", "-p", prompt, "--json", *args))
        return answer

    @property
    def address(self) -> str:
        """Of the router, as ``host:port``."""
        address: str = self.state()["router_address"]
        return address

    @property
    def state_folder(self) -> Path:
        return Path(self.environment["OUTRIDER_STATE_DIR"]) / self.name

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.state_folder / "state.json").read_text())
        return state

    def processes(self) -> list[psutil.Process]:
        """Every process that was started for it, by the state folder in its environment; zombies do not count."""
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.status() != psutil.STATUS_ZOMBIE and (
                    process.environ().get("OUTRIDER_STATE_DIR") == self.environment["OUTRIDER_STATE_DIR"]
                ):
                    mine.append(process)
        return mine

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 180.0) -> Any:
        """The first true value of ``condition``."""
        deadline = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s:g} s: {what}\n{self.logs()}")
            time.sleep(0.1)

    def wait_until_whole(self, num_drafts: int = 1) -> dict[str, Any]:
        """The status once the group and that many drafts are ready."""

        def whole(status: dict[str, Any] | None) -> dict[str, Any] | None:
            if status is None:
                return None
            ready = [draft for draft in status["drafts"] if draft["state"] == "ready"]
            groups = [group["state"] for group in status["groups"]]
            return status if groups == ["ready"] and len(ready) >= num_drafts else None

        what = "a group and its drafts that are ready"
        status: dict[str, Any] = self.wait_for(lambda: whole(self.peek()) and whole(self.status()), what)
        return status

    def logs(self) -> str:
        parts = []
        for path in sorted(self.state_folder.glob("*.log")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-40:]))
        return "\n".join(parts)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and a draft that share a tokenizer."""
    folder = ROOT / "models" / "tiny"
    if (folder / "target" / "config.json").is_file() and (folder / "draft" / "config.json").is_file():
        return folder / "target", folder / "draft"
    return make_random_pair(tmp_path_factory.mktemp("pair"))


def make_random_pair(folder: Path) -> tuple[Path, Path]:
    """A pair of untrained models: byte-level tokens, two layers against one."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["hello world", "def add(a, b): return a + b"] * 10, trainer)
    for name, hidden, layers in (("target", 64, 2), ("draft", 32, 1)):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=320,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=0,
            bos_token_id=None,
            tie_word_embeddings=True,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder / name)
    return folder / "target", folder / "draft"


MakeCluster = Callable[..., Cluster]


def write_cluster(folder: Path, pair: tuple[Path, Path], name: str, **sections: Any) -> Cluster:
    """Settings for the pair, two ranks and one remote draft unless ``sections`` say otherwise. Starts nothing."""
    target, draft = pair
    settings: dict[str, Any] = {
        "cluster": name,
        "target": {"model": str(target), "tensor_parallel_size": 2, "num_threads": 1},
        "drafts": [{"name": "draft", "model": str(draft), "placement": "remote", "num_threads": 1}],
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    environment = {**os.environ, "OUTRIDER_STATE_DIR": str(folder / "state"), "PYTHONSAFEPATH": "1"}
    environment.pop("OUTRIDER_ADDRESS", None)
    return Cluster(name, file, environment)


@pytest.fixture
def make_cluster(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> Iterator[MakeCluster]:
    """Makes the settings of clusters of one's own; what was started is stopped at the end."""
    made: list[Cluster] = []

    def make(name: str = "own", **sections: Any) -> Cluster:
        cluster = write_cluster(tmp_path / name, tiny_pair, name, **sections)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.down()


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the spans of ``running_cluster`` go."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def running_cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair: tuple[Path, Path], collector: Collector
) -> Iterator[Cluster]:
    """Two ranks and a draft of the tiny pair, for all tests of the session.

    A test that breaks a part of it waits until that is whole again (``wait_until_whole``). Only requests that their
    clients sample are traced. Its logs are JSON.
    """
    told = {"metrics_port": 0}
    cluster = write_cluster(
        tmp_path_factory.mktemp("cluster"),
        tiny_pair,
        "shared",
        router=told,
        supervisor=told,
        logging={"format": "json"},
        tracing={"otlp_endpoint": collector.endpoint, "sample_ratio": 0.0},
    )
    cluster.environment["OTEL_BSP_SCHEDULE_DELAY"] = "100"  # milliseconds until spans are sent
    cluster.up()
    yield cluster
    cluster.down()

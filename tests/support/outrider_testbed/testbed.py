"""What tests of a whole run share: one Redis, and workers that start when they are first asked for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.cluster.redis_server import RedisServer
from outrider_testbed.cluster import Cluster
from outrider_testbed.oracle import Oracle
from outrider_testbed.warm import WarmPython
from outrider_testbed.workers import Draft, Target

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"

# Settings of the shared target groups. Only one cluster at a time may use each.
TARGETS: dict[str, dict[str, Any]] = {
    "one": {"world_size": 1},
    "two": {"world_size": 2},
    "small-chunks": {"world_size": 1, "max_num_batched_tokens": 20},
}


class Testbed:
    """Close it at the end: it ends every process that it started."""

    __test__ = False

    def __init__(self, folder: Path, python: WarmPython) -> None:
        self.folder = folder
        self._python = python
        self._redis = RedisServer(folder / "redis")
        self._redis.start()
        self._workers: list[Target | Draft] = []
        self._targets: dict[str, Target] = {}
        self._drafts: dict[str, Draft] = {}
        self._oracle: Oracle | None = None

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._redis.stop()

    def target(self, name: str = "one") -> Target:
        """A group that all tests share."""
        if name not in self._targets:
            self._targets[name] = self.new_target(**TARGETS[name])
        return self._targets[name]

    def new_target(self, world_size: int = 1, **options: Any) -> Target:
        """A group of one's own, to be killed."""
        target = Target(self._python, TINY / "target", world_size, **options)
        self._workers.append(target)
        return target

    def draft(self, name: str = "tiny") -> Draft:
        """A draft that all tests share: "tiny", "tiny-2", "target" (the target as its own draft), or "random"."""
        if name not in self._drafts:
            models = {"target": TINY / "target", "random": self.folder / "random"}
            if name == "random":
                _write_random_model(models["random"])
            self._drafts[name] = self.new_draft(models.get(name, TINY / "draft"), name)
        return self._drafts[name]

    def new_draft(self, model: Path = TINY / "draft", draft_id: str = "d0", **config: Any) -> Draft:
        """A draft of one's own, to be killed."""
        draft = Draft(self._python, model, draft_id, **config)
        self._workers.append(draft)
        return draft

    def cluster(self, target: Target, drafts: Mapping[str, str] | tuple[Draft, ...] = (), **settings: Any) -> Cluster:
        return Cluster(self._redis.url, self.folder, target, drafts, **settings)

    @property
    def oracle(self) -> Oracle:
        if self._oracle is None:
            self._oracle = Oracle(TINY / "target")
        return self._oracle


def _write_random_model(folder: Path) -> None:
    """A model with the pair's tokenizer that has learned nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TINY / "draft")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "draft" / name, folder / name)

"""A router in this process before a stand-in target and draft, with a real Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from outrider.cluster.config import parse_config
from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Registry
from outrider.router.group import GroupSettings
from outrider.router.server import RouterServer
from outrider.testing import StandInDraft, StandInTarget, ToyModel, write_toy_model
from outrider.testing.toy import toy_fingerprint

NUMBERS = itertools.count()
TIMES = GroupSettings(step_timeout_s=60.0, attach_timeout_s=30.0, grace_s=1.0, poll_s=0.05, retry_s=0.05, keep_s=30.0)


@dataclass
class StandIns:
    """Everything that a benchmark talks to."""

    server: RouterServer
    target: StandInTarget
    draft: StandInDraft
    model_folder: Path

    @property
    def address(self) -> str:
        return self.server.address

    def check(self) -> None:
        """Nothing is left behind, and no plan was wrong."""
        assert self.target.faults == []
        assert self.draft.faults == []
        scheduler = self.server.group.scheduler
        assert scheduler is not None
        scheduler.check_integrity()
        assert scheduler.pool.num_free == scheduler.pool.num_blocks


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
async def stand_ins(redis_url: str, model_folder: Path) -> AsyncIterator[StandIns]:
    fingerprint, name = toy_fingerprint(model_folder), f"bench-{next(NUMBERS)}"
    target = StandInTarget(ToyModel(), fingerprint=fingerprint, max_model_len=1024)
    draft = StandInDraft(ToyModel(), fingerprint=fingerprint, max_model_len=1024, wrong_every=5)
    config = parse_config(yaml.safe_dump({"cluster": name, "target": {"model": str(model_folder)}}), base=model_folder)
    async with Registry(redis_url, name, ttl_s=600.0) as registry, target, draft:
        await registry.announce("target", target.group_id, target.record())
        await registry.announce("draft", draft.draft_id, draft.record())
        async with RouterServer(config, redis_url, router_id="router-0", settings=TIMES) as server:
            made = StandIns(server, target, draft, model_folder)
            async with asyncio.timeout(60):
                while not _is_ready(server):  # noqa: ASYNC110 - two objects of the router's own
                    await asyncio.sleep(0.01)
            yield made


def _is_ready(server: RouterServer) -> bool:
    return server.group.is_attached and server.group.num_drafts == 1

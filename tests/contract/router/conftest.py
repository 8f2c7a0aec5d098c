"""A router in this process, with a real Redis, and stand-ins for target and drafts behind real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from outrider.client import AsyncClient
from outrider.cluster.config import ClusterConfig, parse_config
from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Registry
from outrider.core.plan import StepPlan
from outrider.core.tracing import Tracing
from outrider.router.frontend import Frontend
from outrider.router.grammar_door import GrammarDoor
from outrider.router.group import GroupSettings
from outrider.router.group_route import GroupRoute
from outrider.router.sampling_params import Defaults
from outrider.router.server import RouterServer
from outrider.router.tokenizer import TextTokenizer
from outrider.testing import StandInDraft, StandInTarget, ToyModel, write_toy_model
from outrider.testing.toy import toy_fingerprint
from outrider.v1 import generation_pb2_grpc

NUMBERS = itertools.count()
TIMES = GroupSettings(step_timeout_s=60.0, attach_timeout_s=30.0, grace_s=60.0, poll_s=0.05, retry_s=0.05, keep_s=30.0)
# A step of a target that is paused must not end, however slow the machine is.
PATIENT = replace(TIMES, step_timeout_s=120.0)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition; fails with ``what`` if it does not come true in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                value = condition()
                if await value if isinstance(value, Awaitable) else value:
                    return
                await asyncio.sleep(0.01)
    pytest.fail(f"not within {timeout_s} s: {what}")


class World:
    """One cluster of stand-ins. Everything started through it is stopped by it."""

    times = TIMES
    patient = PATIENT
    until = staticmethod(until)

    def __init__(self, redis_url: str, model_folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.redis_url = redis_url
        self.folder = model_folder
        self.name = f"test-{next(NUMBERS)}"
        self.fingerprint = toy_fingerprint(model_folder)
        self.registry = Registry(redis_url, self.name)
        # Members stay as long as a test says, however long the machine stops for.
        self._lasting = Registry(redis_url, self.name, ttl_s=600.0, timeout_s=60.0)
        self.stack = stack
        self._announcers: dict[tuple[str, str], asyncio.Task[None]] = {}

    def config(self, **changes: Any) -> ClusterConfig:
        settings: dict[str, Any] = {"cluster": self.name, "target": {"model": str(self.folder)}, **changes}
        return parse_config(yaml.safe_dump(settings), base=self.folder)

    async def target(self, model: ToyModel | None = None, **options: Any) -> StandInTarget:
        """A running, registered target."""
        options.setdefault("fingerprint", self.fingerprint)
        options.setdefault("model_dir", self.folder)
        target = await self.stack.enter_async_context(StandInTarget(model or ToyModel(), **options))
        self.announce("target", target.group_id, target.record())
        return target

    async def draft(self, model: ToyModel | None = None, **options: Any) -> StandInDraft:
        """A running, registered draft."""
        options.setdefault("fingerprint", self.fingerprint)
        draft = await self.stack.enter_async_context(StandInDraft(model or ToyModel(), **options))
        self.announce("draft", draft.draft_id, draft.record())
        return draft

    async def router(
        self,
        *,
        wait: bool = True,
        times: GroupSettings = TIMES,
        router_id: str = "router-0",
        tracing: Tracing | None = None,
        **changes: Any,
    ) -> RouterServer:
        """A running router, attached to the target unless ``wait`` is False."""
        config = self.config(**changes)
        server = RouterServer(config, self.redis_url, router_id=router_id, settings=times, tracing=tracing)
        await self.stack.enter_async_context(server)
        if wait:
            await until(lambda: server.group.is_attached, "the router attaches")
        return server

    async def remote_frontend(self, server: RouterServer) -> AsyncClient:
        """A client of a frontend that reaches the router's group as one in another process does."""
        tokenizer = TextTokenizer(self.folder)
        route = GroupRoute(None, self.registry, router_id="frontend", poll_s=TIMES.poll_s, takeover_s=60.0)
        following = asyncio.create_task(route.run())
        self.stack.push_async_callback(route.aclose)
        self.stack.callback(following.cancel)
        await until(lambda: route.state == "ready", "the frontend finds the owner of the group")
        grammars = GrammarDoor(self.folder, tokenizer)
        self.stack.callback(grammars.close)
        listener = grpc.aio.server()
        frontend = Frontend(route, tokenizer, grammars, Defaults(), default_timeout_s=60.0)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(frontend, listener)
        address = f"127.0.0.1:{listener.add_insecure_port('127.0.0.1:0')}"
        await listener.start()
        self.stack.push_async_callback(listener.stop, None)
        return await self.stack.enter_async_context(AsyncClient(address, timeout=60))

    async def client(self, server: RouterServer, timeout: float = 60.0) -> AsyncClient:
        return await self.stack.enter_async_context(AsyncClient(server.address, timeout=timeout))

    def keep_in_step(self, target: StandInTarget, draft: StandInDraft, behind: int = 0) -> None:
        """Let no step begin before the draft proposed for the text that it continues, but for the last ``behind``
        tokens; of several requests, for as long a text as the shortest. So it does not matter how fast target and draft
        are.
        """

        async def proposed(plan: StepPlan) -> None:
            wanted = min(sequence.kv_len + sequence.num_text_tokens for sequence in plan.sequences) - behind
            await until(lambda: all(draft.is_done(session, wanted) for session in draft.answered), "the draft proposes")

        target.before_step = proposed

    async def drafts_ready(self, server: RouterServer, count: int = 1) -> None:
        def ready() -> bool:
            pool = server.group.drafts
            return pool is not None and sum(draft.state == "ready" for draft in pool.drafts.values()) == count

        await until(ready, f"{count} drafts are ready")

    def announce(self, kind: Any, member_id: str, record: dict[str, Any]) -> None:
        """Keep a member registered until ``withdraw``."""

        async def repeat() -> None:
            while True:
                await self._lasting.announce(kind, member_id, record)
                await asyncio.sleep(0.5)

        old = self._announcers.pop((kind, member_id), None)
        if old is not None:
            old.cancel()
        self._announcers[kind, member_id] = asyncio.create_task(repeat())

    async def withdraw(self, kind: Any, member_id: str) -> None:
        self._announcers.pop((kind, member_id)).cancel()
        await asyncio.sleep(0)
        await self.registry.withdraw(kind, member_id)

    async def aclose(self) -> None:
        await self.stack.aclose()
        for task in self._announcers.values():
            task.cancel()
        await self.registry.aclose()
        await self._lasting.aclose()


@pytest.fixture
async def world(redis_url: str, model_folder: Path) -> AsyncIterator[World]:
    made = World(redis_url, model_folder, contextlib.AsyncExitStack())
    try:
        yield made
    finally:
        await made.aclose()

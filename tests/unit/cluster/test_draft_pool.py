"""Drafts come when there is a place for them; whoever started them goes on meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.cluster import keeper
from outrider.cluster.config import DraftConfig
from outrider.cluster.draft_pool import DraftPool, DraftProcess
from outrider.cluster.placement import DraftSeat, NodeFacts
from outrider.core.errors import GroupError, Unavailable


class LateDraft:
    """Stands for a worker whose first tries to start fail; once it is there it lives on."""

    def __init__(self, draft_id: str, failures: int) -> None:
        self.draft_id = draft_id
        self.failures = failures
        self.running = False
        self.tries = 0
        self.there = asyncio.Event()
        self.tried_often = asyncio.Event()

    async def start(self, threads_on: Any) -> None:
        self.tries += 1
        if self.tries > self.failures:
            self.running = True
            self.there.set()
            return
        if self.tries >= 4:
            self.tried_often.set()
        raise GroupError("no place")

    async def watch(self) -> None:
        if self.running:
            await asyncio.Event().wait()

    async def stop(self) -> None:
        self.discard()

    def discard(self) -> None:
        self.running = False


def test_a_draft_without_a_place_is_tried_again_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "BACK_OFF_S", (0.0, 0.0))
    late, never, there = LateDraft("late", 3), LateDraft("never", 10**9), LateDraft("there", 0)
    told: list[str] = []
    pool: Any = DraftPool([late, never, there], lambda node: 1, told.append)  # type: ignore[list-item]

    async def run() -> None:
        keeping = asyncio.create_task(pool.keep())
        async with asyncio.timeout(30):
            await asyncio.gather(late.there.wait(), there.there.wait(), never.tried_often.wait())
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await pool.stop()

    asyncio.run(run())
    assert [draft.running for draft in (late, never, there)] == [False] * 3
    assert sorted(told) == ["the draft late is ready", "the draft there is ready"]


def test_who_asks_for_the_start_hears_of_a_failure() -> None:
    pool: Any = DraftPool([LateDraft("late", 1)], lambda node: 1, [].append)  # type: ignore[list-item]
    with pytest.raises(GroupError, match="no place"):
        asyncio.run(pool.start())


class OneNode:
    def nodes(self) -> list[NodeFacts]:
        return [NodeFacts("head", "10.0.0.1", 1, {"CPU": 4.0}, {"CPU": 4.0})]


def test_a_draft_that_no_node_could_hold_says_so_at_once() -> None:
    pool = DraftConfig(model="draft", name="far", placement="remote", resources={"draft-far": 1})
    ray: Any = OneNode()
    group: Any = None
    seat = DraftSeat(pool, 0, {"CPU": 1.0, "draft-far": 1.0})
    draft = DraftProcess(ray, seat, group, cluster="c", redis_url="")
    with pytest.raises(Unavailable, match=r"the draft far-0 has no node: 1 draft-far wanted, 0 in the Ray cluster"):
        asyncio.run(draft.start(lambda node: 1))
    assert draft.draft_id == "far-0"

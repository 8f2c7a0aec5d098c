"""Profile and load with two real ranks and a real draft of the tiny pair: every number is there, text is unharmed."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.bench.items import Item, Workload
from outrider.bench.run import BenchSettings, run
from outrider.bench.summary import summarise
from outrider.client import AsyncClient, Endpoint
from outrider.cluster.commands.profile import as_facts, measure
from outrider.v1 import admin_pb2


def test_a_profile_of_real_ranks_between_requests(testbed: Any) -> None:
    request = admin_pb2.ProfileRequest(rows=[1, 5], contexts=[32, 100], num_sequences=[1, 2], num_runs=3)
    request.num_proposals = 4
    with testbed.cluster(testbed.target("two"), (testbed.draft(),)) as cluster:

        async def measured() -> tuple[Any, Any, Any]:
            async with AsyncClient(cluster.address, timeout=60) as client:
                before = await client.generate("The with statement", max_tokens=24, temperature=0)
                profile = asyncio.create_task(measure(Endpoint(cluster.address), request, 200.0, lambda *_: None))
                beside = await client.generate("The with statement", max_tokens=24, temperature=0)
                return before, beside, as_facts(await profile)

        before, beside, facts = asyncio.run(measured())
        assert cluster.status()["groups"][0]["state"] == "ready"
    assert before.token_ids == beside.token_ids
    assert {(cost["num_sequences"], cost["context"], cost["rows"]) for cost in facts["passes"]} == {
        (count, context, rows) for count in (1, 2) for context in (32, 100) for rows in (1, 5)
    }
    for cost in facts["passes"]:
        assert cost["num_runs"] == 3
        for name in ("forward_ms", "overhead_ms", "plan_ms", "verify_ms"):
            assert 0 < cost[name]["min"] <= cost[name]["p50"] <= cost[name]["max"]
    assert facts["draft_ms"] > 0
    assert facts["drafts"][0]["num_proposals"] == 4
    assert facts["overhead_ms"] > 0
    assert facts["group"]["tensor_parallel_size"] == 2


def test_a_load_on_real_ranks(testbed: Any) -> None:
    items = tuple(Item(f"i{number}", f"The with statement {number}", max_tokens=16) for number in range(4))
    options = {"temperature": 0.0, "ignore_eos": True}
    settings = BenchSettings(
        (Workload("real", items, "made"),), requests=4, blocks=2, concurrency=2, options=options, deadline_s=100.0
    )
    with testbed.cluster(testbed.target("two"), (testbed.draft(),)) as cluster:
        figures = summarise(asyncio.run(run(cluster.address, settings, lambda *_: None)))["workloads"]["real"]
    for arm in figures["arms"].values():
        assert (arm["failed"], arm["refused"], arm["completion_tokens"]) == (0, 0, 64)
        assert arm["ttft_ms"]["p50"] > 0
        assert arm["message_gap_ms"]["p50"] >= arm["token_gap_ms"]["p50"] > 0
    assert figures["arms"]["plain"]["speculation"]["target_calls_per_token"] == 1.0
    assert figures["arms"]["speculative"]["speculation"]["target_calls_per_token"] <= 1.0
    assert figures["over_plain"]["speculative"]["speed"]["pairs"] == 4

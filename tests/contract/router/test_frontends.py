"""Several routers, of which one owns the group: what the others answer, and what happens when one of them goes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import yaml

from outrider.client import AsyncClient, InvalidRequest, Unavailable
from outrider.cluster.registry import Registry
from outrider.core.sampling import Sampling, Verifier
from outrider.router import group_service, remote_group
from outrider.router.group_route import GroupRoute
from outrider.router.group_service import GroupServicer
from outrider.router.lease import GroupLease
from outrider.router.requests import NewRequest
from outrider.router.submission import submit_to_wire
from outrider.testing import ToyModel
from outrider.v1 import group_pb2, group_pb2_grpc
from outrider_pings import with_quick_pings
from outrider_testbed.relay import Relay

PROMPT = "Once upon"
DEADLINE_S = 60.0
SILENCE_S = 40.0  # to notice that a peer is silent: less than gRPC's own timeout, with no need to be quick
LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}


def expected(count: int, prompt: str = PROMPT, choice: int = 0) -> str:
    return bytes(ToyModel().output(list(prompt.encode()), count, choice)).decode()


# However long the machine stops for, no lease runs out by itself: a test ends the one that it wants to see end.
TTL_S = 600.0
PAUSE_S = 0.2
LAUNCHER = f"""
import sys
from outrider.cluster.registry import Registry
from outrider.router.lease import GroupLease
Registry.__init__.__kwdefaults__["ttl_s"] = {TTL_S}
GroupLease._pause_s = {PAUSE_S}
from outrider.router.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _lasting_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {**(Registry.__init__.__kwdefaults__ or {}), "ttl_s": TTL_S}
    monkeypatch.setattr(Registry.__init__, "__kwdefaults__", defaults)
    monkeypatch.setattr(GroupLease, "_pause_s", PAUSE_S)


async def two_routers(world: Any, **changes: Any) -> tuple[Any, Any]:
    """The owner, and a frontend that has found it. A paused target is not given up by either."""
    times = replace(world.times, step_timeout_s=2 * DEADLINE_S)
    owner = await world.router(router_id="owner", times=times, **changes)
    other = await world.router(router_id="frontend", wait=False, times=times, **changes)
    await world.until(lambda: other.route.state == "ready", "the frontend is ready", timeout_s=DEADLINE_S)
    return owner, other


async def held_at(world: Any, target: Any, owner: Any, client: Any, **options: Any) -> asyncio.Task[Any]:
    """A long request of the client that runs at the owner, where the target answers nothing until it resumes."""
    target.pause()
    running = asyncio.create_task(client.generate(PROMPT, max_tokens=400, temperature=0, **options))
    await world.until(lambda: owner.group.num_unfinished == 1, "it runs at the owner", timeout_s=DEADLINE_S)
    return running


async def finish_at(owner: Any, request_id: str, choice: int = 0) -> group_pb2.Finish:
    """What the owner of the group knows of a request that has ended."""
    updates = [update async for update in owner.group.watch(request_id, len(PROMPT), 0, choice)]
    finish: group_pb2.Finish = updates[-1].finish
    return finish


# In one process: what is answered.


async def test_text_and_statistics_are_those_of_the_owner(world: Any) -> None:
    await world.target()
    owner, other = await two_routers(world, speculation=LOOKUP)
    near, far = await world.client(owner, DEADLINE_S), await world.client(other, DEADLINE_S)
    asked: list[dict[str, Any]] = [
        {"max_tokens": 40, "temperature": 0},
        {"max_tokens": 40, "seed": 7, "n": 3, "logprobs": 2},
        {"max_tokens": 30, "temperature": 0, "stop": [expected(12)[-3:]]},
        {"max_tokens": 5, "temperature": 0, "prompt_logprobs": 1, "echo": True},
    ]
    for number, options in enumerate(asked):
        answers = [await client.generate(PROMPT, request_id=f"{number}", **options) for client in (near, far)]
        first, second = ([choice.to_dict() for choice in answer.choices] for answer in answers)
        for choice in (*first, *second):
            del choice["timing"], choice["speculation"]  # what is looked up when depends on how fast steps are
        assert first == second
        assert answers[0].prompt_logprobs == answers[1].prompt_logprobs
        assert answers[0].prompt_text == answers[1].prompt_text
        near_usage, far_usage = (replace(answer.usage, cached_prompt_tokens=0) for answer in answers)
        assert near_usage == far_usage
        for index, choice in enumerate(answers[1].choices):
            stats = (await finish_at(owner, f"{number}", index)).speculation
            assert list(choice.speculation.acceptance_histogram) == list(stats.acceptance_histogram)
            assert choice.speculation.num_draft_tokens == stats.num_draft_tokens
            assert choice.speculation.num_accepted_tokens == stats.num_accepted_tokens
            assert choice.speculation.target_calls == stats.target_calls
            assert choice.speculation.drafter == stats.drafter
    assert stats.target_calls > 0
    near_status, far_status = await near.status(), await far.status()
    assert near_status["groups"] == far_status["groups"]
    assert far_status["groups"][0]["state"] == "ready"
    assert (near_status["router_id"], far_status["router_id"]) == ("owner", "frontend")
    with pytest.raises(InvalidRequest, match="the context holds"):
        await far.generate("x" * 600)


async def test_http_through_a_frontend(world: Any) -> None:
    await world.target()
    owner, other = await two_routers(world, router={"served_model_name": "toy"})
    cards: list[Any] = []
    answers = []
    for url in (owner.http_url, other.http_url):
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            cards.append((await client.models.retrieve("toy")).to_dict())
            stream = await client.completions.create(model="toy", prompt=PROMPT, max_tokens=30, stream=True, seed=3)
            answers.append("".join([chunk.choices[0].text async for chunk in stream]))
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="toy", prompt="x" * 600)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
            assert (await http.get(url.removesuffix("/v1") + "/ready")).json() == {"status": "ready"}
    assert answers == [expected(30)] * 2
    assert cards[0]["max_model_len"] == cards[1]["max_model_len"] > 0


async def test_clients_find_no_group_service_at_their_port(world: Any) -> None:
    await world.target()
    server = await world.router()
    route = GroupRoute(None, world.registry, router_id="x", poll_s=0.05, takeover_s=60.0)
    await route._choose({"router_id": "y", "group_address": server.address, "group_token": 1})
    try:
        await world.until(lambda: route.state.startswith("lost"), "it is refused", timeout_s=DEADLINE_S)
    finally:
        await route.aclose()


async def test_an_abort_reaches_the_owner_and_so_does_a_client_that_goes_away(world: Any) -> None:
    target = await world.target()
    owner, other = await two_routers(world)
    client = await world.client(other, DEADLINE_S)
    running = await held_at(world, target, owner, client, request_id="one")
    assert await client.abort("one")
    target.resume()
    assert (await running).finish_reason == "abort"
    running = await held_at(world, target, owner, client, request_id="two")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.until(lambda: owner.group.num_unfinished == 0, "it is aborted", timeout_s=DEADLINE_S)
    target.resume()


async def test_what_nobody_watches_is_aborted(world: Any) -> None:
    target = await world.target()
    server = await world.router(times=replace(world.times, step_timeout_s=2 * DEADLINE_S))
    servicer = GroupServicer(
        server.group, server._tokenizer, server._grammars, group_pb2.DescribeResponse, unwatched_s=0.05
    )
    target.pause()
    greedy = Sampling(temperature=0.0, seed=1, verifier=Verifier.GREEDY)
    context: Any = None  # which it needs for errors only
    request = NewRequest("orphan", 0, tuple(PROMPT.encode()), greedy, max_tokens=400)
    answer = await servicer.Submit(submit_to_wire(request, 0.0), context)
    assert not answer.not_here
    await world.until(lambda: server.group.num_unfinished == 0, "it is aborted", timeout_s=DEADLINE_S)
    target.resume()
    servicer.draining = True
    assert (await servicer.Submit(submit_to_wire(request, 0.0), context)).not_here


async def test_an_owner_that_lost_the_group_ends_what_it_ran(world: Any) -> None:
    """As after a pause of its process that was longer than the lease."""
    target = await world.target()
    owner, other = await two_routers(world)
    client = await world.client(owner, DEADLINE_S)
    running = await held_at(world, target, owner, client)
    lease = owner.group.target._lease
    registry = world.registry
    held = registry._key("owner", lease.group_id), f"{lease.token + 1}:frontend"  # which will claim it again
    await registry._redis.set(*held, px=round(1000 * TTL_S))
    with pytest.raises(Unavailable, match=r"another router owns group .*; send the request again"):
        await running
    target.resume()
    await world.until(lambda: other.group.is_attached, "the other router owns it", timeout_s=DEADLINE_S)
    await world.until(lambda: owner.route.state == "ready", "its frontend goes on", timeout_s=DEADLINE_S)
    for server in (owner, other):
        answer = await (await world.client(server, DEADLINE_S)).generate(PROMPT, max_tokens=9, temperature=0)
        assert answer.text == expected(9)
    assert not owner.group.is_owned


async def test_the_end_of_grace_ends_streams_with_an_error(world: Any) -> None:
    """At the owner and through a frontend, over gRPC and HTTP."""
    target = await world.target()
    owner, other = await two_routers(world, router={"served_model_name": "toy"})
    target.pause()
    for server in (other, owner):
        client = await world.client(server, DEADLINE_S)
        over_grpc = asyncio.create_task(client.generate(PROMPT, max_tokens=400, temperature=0))
        async with openai.AsyncOpenAI(base_url=server.http_url, api_key="x", max_retries=0, timeout=DEADLINE_S) as http:
            asked: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 400, "temperature": 0}
            whole = asyncio.create_task(http.completions.create(**asked))
            stream = await http.completions.create(**asked, stream=True)
            await world.until(lambda: owner.group.num_unfinished == 3, "three run", timeout_s=DEADLINE_S)
            stopping = asyncio.create_task(server.stop(0.0))
            with pytest.raises(openai.APIError, match="shutting down; send the request again") as caught:
                [chunk async for chunk in stream]
            assert caught.value.code == "unavailable"
            with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
                await whole
            assert refused.value.status_code == 503
            with pytest.raises(Unavailable, match="shutting down"):
                await over_grpc
            await asyncio.wait_for(stopping, DEADLINE_S)
        await world.until(lambda: owner.group.num_unfinished == 0, "nothing runs", timeout_s=DEADLINE_S)
    target.resume()


# What goes wrong between the two.


async def test_a_submit_that_is_late_is_no_reason_to_give_up_what_runs(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = await world.target()
    owner, other = await two_routers(world)
    client = await world.client(other, DEADLINE_S)
    running = await held_at(world, target, owner, client, request_id="one")

    async def never(_: NewRequest) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(owner.group, "submit", never)
    monkeypatch.setattr(other.route.remote, "_timeout_s", 0.0)
    monkeypatch.setattr(remote_group, "ABORT_TIMEOUT_S", DEADLINE_S)
    with pytest.raises(Unavailable, match=r"does not answer as it should .DEADLINE_EXCEEDED"):
        await client.generate(PROMPT, request_id="two")
    assert await client.abort("one")
    target.resume()
    assert (await running).finish_reason == "abort"


async def test_what_the_owner_would_never_take_is_not_asked_again(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.target()
    _, other = await two_routers(world)
    client, remote = await world.client(other, DEADLINE_S), other.route.remote
    # As of an owner of another version.
    unknown = remote._channel.unary_unary(
        "/outrider.v1.GroupService/Take", request_serializer=group_pb2.SubmitRequest.SerializeToString
    )
    monkeypatch.setattr(remote._stub, "Submit", unknown)
    with pytest.raises(Unavailable, match=r"does not answer as it should .UNIMPLEMENTED"):
        await client.generate(PROMPT)


async def test_a_submit_that_is_under_way_when_the_owner_changes_goes_to_the_next(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.target()
    server = await world.router()
    asked = asyncio.Event()

    async def never(_: NewRequest) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(server.group, "submit", never)
    greedy = Sampling(temperature=0.0, seed=1, verifier=Verifier.GREEDY)
    remote = remote_group.RemoteGroup(server.group_address)
    submitting = asyncio.create_task(remote.submit(NewRequest("one", 0, tuple(PROMPT.encode()), greedy, max_tokens=4)))
    await asyncio.wait_for(asked.wait(), DEADLINE_S)
    await remote.aclose()
    with pytest.raises(remote_group.NotHere):
        await submitting


async def test_an_owner_that_drains_is_not_asked_and_not_waited_for_without_end(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.target()
    owner, other = await two_routers(world)
    client, remote = await world.client(other, DEADLINE_S), other.route.remote
    owner._group_servicer.draining = True
    await world.until(lambda: remote.is_draining, "it says so", timeout_s=DEADLINE_S)
    with monkeypatch.context() as patch:
        patch.setattr(other.route, "_max_wait_s", 0.0)
        patch.setattr(remote._stub, "Submit", None)
        with pytest.raises(Unavailable, match=r"shutting down.; try again later"):
            await client.generate(PROMPT)
    waiting = asyncio.create_task(client.generate(PROMPT, max_tokens=9, temperature=0))
    await world.until(lambda: other._frontend.num_open == 1, "it waits", timeout_s=DEADLINE_S)
    owner._group_servicer.draining = False  # as the next owner would
    assert (await waiting).text == expected(9)


async def test_an_owner_that_is_not_understood_is_asked_again(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await world.target()
    owner, other = await two_routers(world)

    def garbled(_: object) -> None:
        raise ValueError("of another version")

    with monkeypatch.context() as patch:
        patch.setattr(remote_group, "group_info_from_wire", garbled)
        owner._group_servicer.draining = True  # which it tells
        await world.until(lambda: other.route.state.startswith("lost"), "it is lost", timeout_s=DEADLINE_S)
    owner._group_servicer.draining = False
    await world.until(lambda: other.route.state == "ready", "it is found again", timeout_s=DEADLINE_S)
    told = [record for record in caplog.records if "is not understood" in record.message]
    assert [record.levelname for record in told] == ["ERROR"]
    assert (await (await world.client(other, DEADLINE_S)).generate(PROMPT, max_tokens=9, temperature=0)).text


async def test_a_frontend_notices_an_owner_whose_host_is_gone(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_group, "OPTIONS", with_quick_pings(remote_group.OPTIONS))
    await world.target()
    server = await world.router()
    with Relay(server.group_address) as relay:
        remote = remote_group.RemoteGroup(relay.address)
        following = asyncio.create_task(remote.follow())
        try:
            await world.until(lambda: remote.is_heard, "the owner is heard", timeout_s=DEADLINE_S)
            relay.delay_s = (1e6, 1e6)
            await world.until(lambda: not remote.is_heard, "its silence is noticed", timeout_s=SILENCE_S)
        finally:
            following.cancel()
            await remote.aclose()


async def test_an_owner_notices_a_frontend_whose_host_is_gone(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a host says nothing, not even that its connections end."""
    monkeypatch.setattr(group_service, "SERVER_OPTIONS", with_quick_pings(group_service.SERVER_OPTIONS))
    target = await world.target()
    server = await world.router(times=replace(world.times, step_timeout_s=2 * DEADLINE_S))
    servicer = server._group_servicer
    servicer._unwatched_s = 0.05
    target.pause()
    greedy = Sampling(temperature=0.0, seed=1, verifier=Verifier.GREEDY)
    start = await server.group.submit(NewRequest("one", 0, tuple(PROMPT.encode()), greedy, max_tokens=400))
    request = group_pb2.WatchRequest(request_id="one", from_position=start.position)
    request.header.generation = start.generation
    with Relay(server.group_address) as relay:
        async with grpc.aio.insecure_channel(relay.address) as channel:
            watch = group_pb2_grpc.GroupServiceStub(channel).Watch(request)
            await world.until(
                lambda: servicer._watchers or not server.group.num_unfinished, "it is watched", timeout_s=DEADLINE_S
            )
            relay.delay_s = (1e6, 1e6)
            await world.until(lambda: not server.group.num_unfinished, "it is aborted", timeout_s=SILENCE_S)
            watch.cancel()
    target.resume()


# With processes of their own.


class Router:
    """One process."""

    def __init__(self, world: Any, file: Path, router_id: str) -> None:
        command = [sys.executable, "-P", "-c", LAUNCHER, "-f", str(file), "--router-id", router_id]
        command += ["--redis", world.redis_url, "--grace", "600"]
        self.router_id = router_id
        self.process = subprocess.Popen(command, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
        self.record: dict[str, Any] = {}

    @property
    def client(self) -> AsyncClient:
        return AsyncClient(self.record["address"], timeout=DEADLINE_S)

    @property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.record["http_url"], api_key="x", max_retries=0, timeout=DEADLINE_S)

    async def state(self) -> str:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
            answer = await http.get(self.record["http_url"].removesuffix("/v1") + "/ready")
        return str(answer.json()["status"])

    async def text(self, count: int = 20) -> str:
        async with self.client as client:
            return (await client.generate(PROMPT, max_tokens=count, temperature=0)).text

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)


class Routers:
    """Three of them, and who owns the group."""

    def __init__(self, world: Any, all_of_them: list[Router]) -> None:
        self.world = world
        self.all = all_of_them

    async def owner(self) -> Router:
        """Once everybody who lives is registered, and one of them owns the group."""
        found: list[Router] = []

        async def known() -> bool:
            members = await self.world.registry.members("router")
            living = [router for router in self.all if router.process.poll() is None]
            for router in living:
                router.record = members.get(router.router_id, {})
            found[:] = [router for router in living if router.record.get("group_token")]
            return len(found) == 1 and all(router.record for router in living)

        await self.world.until(known, "one of the routers owns the group", timeout_s=DEADLINE_S)
        return found[0]

    async def others(self) -> list[Router]:
        owner = await self.owner()
        return [router for router in self.all if router is not owner and router.process.poll() is None]

    async def num_running(self) -> int:
        async with (await self.owner()).client as client:
            status = await client.status()
        return int(status["running"]) + int(status["queued"])

    async def runs(self, count: int) -> None:
        async def so_many() -> bool:
            return await self.num_running() == count

        await self.world.until(so_many, f"{count} requests run", timeout_s=DEADLINE_S)


@pytest.fixture
async def routers(world: Any, tmp_path: Path) -> AsyncIterator[Routers]:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(world.config(router={"served_model_name": "toy"}).model_dump(mode="json")))
    made = Routers(world, [Router(world, file, f"router-{number}") for number in range(3)])
    try:
        yield made
    finally:
        for router in made.all:
            router.process.kill()
            router.process.wait()


async def streamed(router: Router, count: int) -> tuple[openai.AsyncOpenAI, Any]:
    """A stream over HTTP whose head has come."""
    client = router.openai
    asked: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": count, "temperature": 0}
    return client, await client.completions.create(**asked, stream=True)


async def rest_of(stream: Any) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_a_frontend_ends_and_nobody_else_notices(world: Any, routers: Routers) -> None:
    target = await world.target()
    owner = await routers.owner()
    first, second = await routers.others()
    for router in routers.all:
        assert await router.state() == "ready"
        assert await router.text() == expected(20)
        client, stream = await streamed(router, 25)
        async with client:
            assert await rest_of(stream) == expected(25)

    target.pause()
    streams = [await streamed(router, 30) for router in routers.all]
    await routers.runs(3)
    first.process.send_signal(signal.SIGTERM)

    async def drains() -> bool:
        return await first.state() == "draining"

    await world.until(drains, "it drains", timeout_s=DEADLINE_S)
    second.process.kill()
    await routers.runs(2)  # nobody watches its request any more
    target.resume()
    for router, (client, stream) in zip(routers.all, streams, strict=True):
        async with client:
            if router is second:
                with pytest.raises((httpx.HTTPError, openai.APIError)):
                    await rest_of(stream)
            else:
                assert await rest_of(stream) == expected(30)
    assert await first.ended() == 0
    assert await owner.text() == expected(20)
    assert target.faults == []


async def test_the_owner_ends_and_another_one_serves(world: Any, routers: Routers) -> None:
    target = await world.target()
    owner = await routers.owner()
    others = await routers.others()
    for router in others:
        assert await router.text() == expected(20)

    # It drains: streams end as if nothing had happened, and what is new waits for the next owner.
    target.pause()
    streams = [await streamed(router, 30) for router in routers.all]
    await routers.runs(3)
    owner.process.send_signal(signal.SIGTERM)

    async def drains() -> bool:
        return await owner.state() == "draining"

    await world.until(drains, "it drains", timeout_s=DEADLINE_S)
    waiting = [asyncio.create_task(router.text()) for router in others]
    target.resume()
    for client, stream in streams:
        async with client:
            assert await rest_of(stream) == expected(30)
    assert await asyncio.gather(*waiting) == [expected(20)] * 2
    assert await owner.ended() == 0

    # It dies: what it ran for others fails and may be sent again.
    owner = await routers.owner()
    (last,) = await routers.others()
    target.pause()
    client, stream = await streamed(last, 30)
    await routers.runs(1)
    async with last.client as over_grpc:
        running = asyncio.create_task(over_grpc.generate(PROMPT, max_tokens=30, temperature=0))
        await routers.runs(2)
        owner.process.kill()
        with pytest.raises(Unavailable, match="send the request again"):
            await running
    await world.registry._redis.delete(world.registry._key("owner", owner.record["group_id"]))  # it runs out
    await world.registry.withdraw("router", owner.router_id)
    async with client:
        with pytest.raises(openai.APIError, match="send the request again") as caught:
            await rest_of(stream)
        assert caught.value.code == "unavailable"
    target.resume()
    assert await last.text() == expected(20)  # sent at once
    assert await routers.owner() is last
    assert await last.state() == "ready"
    assert target.faults == []

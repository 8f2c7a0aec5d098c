"""The other services: group, administration, health, reflection; errors with details; the router as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client import AsyncClient, Conflict, InvalidRequest, NotFound, Overloaded, Unavailable
from outrider.core.errors_wire import DETAILS_KEY
from outrider.core.sampling import Sampling, Verifier
from outrider.router.remote_group import RemoteGroup
from outrider.router.requests import NewRequest
from outrider.router.submission import submit_to_wire
from outrider.testing import ToyModel
from outrider.v1 import common_pb2, generation_pb2, group_pb2

PROMPT = "Once upon"
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)


def expected(count: int, prompt: str = PROMPT) -> list[int]:
    return ToyModel().output(list(prompt.encode()), count)


def new_request(request_id: str, **options: Any) -> NewRequest:
    return NewRequest(request_id, 0, tuple(PROMPT.encode()), options.pop("sampling", GREEDY), **options)


# Errors.


def sampling(**values: Any) -> Any:
    return lambda request: request.sampling.MergeFrom(generation_pb2.SamplingParams(**values))


def setting(name: str, value: Any) -> Any:
    return lambda request: setattr(request, name, value)


def adding(name: str, *values: Any) -> Any:
    return lambda request: getattr(request, name).extend(values)


def control(name: str, value: str) -> Any:
    return lambda request: request.sampling.controls.update({name: value})


def setting_of_sampling(name: str, value: Any) -> Any:
    return lambda request: setattr(request.sampling, name, value)


def ignoring_eos_with_a_grammar(request: group_pb2.SubmitRequest) -> None:
    request.sampling.grammar.regex = "a"
    request.ignore_eos = True


BAD = [
    (sampling(temperature=float("nan")), "sampling.temperature"),
    (sampling(temperature=float("inf")), "sampling.temperature"),
    (sampling(temperature=-1.0), "sampling.temperature"),
    (sampling(temperature=1e-9), "sampling.temperature"),
    (sampling(temperature=1000.0), "sampling.temperature"),
    (sampling(top_p=0.0), "sampling.top_p"),
    (sampling(top_p=1.5), "sampling.top_p"),
    (sampling(top_p=float("nan")), "sampling.top_p"),
    (sampling(verifier=9), "sampling.verifier"),
    (sampling(verifier=common_pb2.VERIFIER_GREEDY), "sampling.verifier"),
    (sampling(temperature=0.0, verifier=common_pb2.VERIFIER_COUPLED), "sampling.verifier"),
    (sampling(temperature=0.0, verifier=common_pb2.VERIFIER_REJECTION), "sampling.verifier"),
    (setting("max_tokens", 0), "max_tokens"),
    (setting("num_speculative_tokens", 65), "num_speculative_tokens"),
    (adding("stop", ""), "stop[0]"),
    (adding("stop", "a", "x" * 257), "stop[1]"),
    (adding("stop", *map(str, range(17))), "stop"),
    (adding("stop_token_ids", 0, 258), "stop_token_ids[1]"),
    (setting("text", ""), "text"),
    (setting("text", "x" * 512), "text"),
    (lambda request: request.ClearField("text"), "prompt"),
    (lambda request: request.token_ids.SetInParent(), "token_ids.ids"),
    (lambda request: request.token_ids.ids.extend([1, 2, 258]), "token_ids.ids[2]"),
    (lambda request: request.token_ids.ids.extend([2**32 - 1]), "token_ids.ids[0]"),
    (lambda request: request.chat.SetInParent(), "chat.messages"),
    (lambda request: request.chat.messages.add(content="hi"), "chat.messages[0].role"),
    (sampling(logprobs=21), "sampling.logprobs"),
    (sampling(min_p=1.5), "sampling.min_p"),
    (sampling(logit_bias={258: 1.0}), "sampling.logit_bias[258]"),
    (sampling(min_tokens=504), "sampling.min_tokens"),
    (sampling(grammar=common_pb2.Grammar(regex="(")), "sampling.grammar.regex"),
    (setting("n", 65), "n"),
    (setting("request_id", "x" * 129), "request_id"),
    (setting("request_id", "a\nb"), "request_id"),
]


async def test_every_bad_value_is_refused_by_the_name_of_its_field(world: Any) -> None:
    await world.target()
    server = await world.router()
    client = await world.client(server)
    for change, field in BAD:
        request = generation_pb2.GenerateRequest(text=PROMPT)
        change(request)
        call = client._generation.Generate(request, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, caught.value)
        status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())[DETAILS_KEY])
        bad = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(bad)
        assert bad.field_violations[0].field == field
        assert bad.field_violations[0].description.startswith("must be ")
        assert caught.value.details().startswith(f"{field} is ")
        assert "\n" not in caught.value.details()
    assert server.group.num_unfinished == 0
    assert (await client.generate(PROMPT, max_tokens=3, temperature=0)).text


async def test_the_client_raises_what_the_server_meant(world: Any) -> None:
    await world.target()
    client = await world.client(await world.router())
    with pytest.raises(InvalidRequest) as caught:
        await client.generate(PROMPT, top_p=1.5)
    assert (caught.value.field, caught.value.limit) == ("sampling.top_p", "above 0 and at most 1")
    assert str(caught.value) == "sampling.top_p is 1.5, but must be above 0 and at most 1"
    with pytest.raises(InvalidRequest, match=r"stop\[0\] is '', but must be from 1 to 256 characters long"):
        await client.generate(PROMPT, stop=[""])


async def test_the_queue_is_bounded(world: Any) -> None:
    target = await world.target()
    server = await world.router(times=world.patient, router={"max_queue": 1, "max_num_seqs": 1})
    client = await world.client(server)
    target.pause()
    tasks = [asyncio.create_task(client.generate(PROMPT, max_tokens=50, temperature=0)) for _ in range(2)]
    await world.until(lambda: server.group.num_unfinished == 2, "one runs and one waits")
    with pytest.raises(Overloaded, match="try again later"):
        await client.generate(PROMPT)
    target.resume()
    for task in tasks:
        assert list((await task).token_ids) == expected(50)
    assert target.faults == []


# The group service, as a frontend in another process uses it.


async def test_submit_watch_and_abort_from_another_process(world: Any) -> None:
    target = await world.target(step_s=0.005)
    server = await world.router()
    remote = RemoteGroup(server.group_address)
    try:
        start = await remote.submit(new_request("one", max_tokens=30))
        assert (start.position, start.epoch) == (len(PROMPT), 1)
        tokens: list[int] = []
        async for update in remote.watch("one", start.position, start.generation):
            assert update.position == len(PROMPT) + len(tokens)
            tokens.extend(update.tokens)
        assert update.finish is not None
        assert update.finish.reason == group_pb2.FINISH_REASON_LENGTH
        assert tokens == expected(30)
        # From the middle, and after the end: what was said is said again.
        again = [update async for update in remote.watch("one", len(PROMPT) + 12)]
        assert [token for update in again for token in update.tokens] == expected(30)[12:]
        assert again[-1].finish == update.finish

        target.pause()
        await remote.submit(new_request("two", max_tokens=400))
        with pytest.raises(Conflict):
            await remote.submit(new_request("two"))
        assert await remote.abort("two", "enough")
        last = [update async for update in remote.watch("two", len(PROMPT))][-1]
        assert last.finish is not None
        assert last.finish.reason == group_pb2.FINISH_REASON_ABORT
        assert not await remote.abort("two", "again")
        target.resume()
        with pytest.raises(NotFound):
            [update async for update in remote.watch("three", 0)]
        with pytest.raises(InvalidRequest, match="request_id"):
            [update async for update in remote.watch("\u6f22" * 4000, 0)]
        with pytest.raises(InvalidRequest, match="from_position"):
            [update async for update in remote.watch("one", 2)]
        with pytest.raises(InvalidRequest, match="prompt_tokens"):
            await remote.submit(NewRequest("four", 0, (999,), GREEDY))
        assert target.faults == []
    finally:
        await remote.aclose()


BAD_SUBMITS = [
    (lambda request: request.ClearField("sampling"), "sampling"),
    (lambda request: request.sampling.ClearField("verifier"), "sampling.verifier"),
    (lambda request: setattr(request.sampling, "verifier", common_pb2.VERIFIER_COUPLED), "sampling.verifier"),
    (lambda request: setattr(request.sampling, "temperature", 1e-310), "sampling.temperature"),
    (lambda request: setattr(request.sampling, "temperature", float("nan")), "sampling.temperature"),
    (lambda request: setattr(request.sampling, "top_p", 0.0), "sampling.top_p"),
    (setting("num_speculative_tokens", 2**32 - 1), "num_speculative_tokens"),
    (adding("stop", ""), "stop[0]"),
    (adding("stop_token_ids", 258), "stop_token_ids[0]"),
    (setting("request_id", "a\nb"), "request_id"),
    (setting_of_sampling("choice", 1), "sampling.choice"),
    (setting_of_sampling("logprobs", 21), "sampling.logprobs"),
    (setting_of_sampling("prompt_logprobs", 2**31), "sampling.prompt_logprobs"),
    (setting_of_sampling("logprobs_mode", 9), "sampling.logprobs_mode"),
    (control("min_p", "2.0"), "sampling.controls['min_p']"),
    (control("min_p", "NaN"), "sampling.controls['min_p']"),
    (control("min_p", '"much"'), "sampling.controls['min_p']"),
    (control("logit_bias", "[[258, 1.0]]"), "sampling.controls['logit_bias']"),
    (control("logit_bias", "7"), "sampling.controls['logit_bias']"),
    (control("bad_words", "[[300]]"), "sampling.controls['bad_words']"),
    (control("min_tokens", "3"), "sampling.controls['min_tokens']"),
    (control("nonesuch", "1"), "sampling.controls['nonesuch']"),
    (control("min_p", "no JSON"), "sampling.controls"),
    (control("min_p", "[" * 100_000), "sampling.controls"),
    (lambda request: request.sampling.grammar.SetInParent(), "sampling.grammar"),
    (lambda request: setattr(request.sampling.grammar, "regex", "("), "sampling.grammar.regex"),
    (ignoring_eos_with_a_grammar, "ignore_eos"),
    (lambda request: (setattr(request, "max_tokens", 3), setattr(request, "min_tokens", 4)), "sampling.min_tokens"),
    (setting("min_tokens", 2**32 - 1), "sampling.min_tokens"),
    (setting("num_choices", 65), "num_choices"),
    (setting("num_choices", 2), "num_choices"),  # at temperature 0
]


async def test_every_bad_submit_is_refused_by_the_name_of_its_field(world: Any) -> None:
    """The owner of a group trusts no frontend: such values would break steps of others, or fill its memory."""
    await world.target()
    server = await world.router()
    remote = RemoteGroup(server.group_address)
    try:
        for change, field in BAD_SUBMITS:
            request = submit_to_wire(new_request("bad", eos_token_ids=frozenset([256])), 0.0)
            change(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await remote._stub.Submit(request, timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, caught.value)
            assert caught.value.details().startswith(f"{field} is ")
        assert server.group.num_unfinished == 0
    finally:
        await remote.aclose()


async def test_a_late_abort_does_not_end_the_next_request_of_that_id(world: Any) -> None:
    await world.target(step_s=0.005)
    server = await world.router()
    first = await server.group.submit(new_request("same", max_tokens=400))
    assert await server.group.abort("same", "first", first.generation)
    second = await server.group.submit(new_request("same", max_tokens=20))
    assert second.generation > first.generation
    assert not await server.group.abort("same", "late", first.generation)
    updates = [update async for update in server.group.watch("same", second.position, second.generation)]
    assert [token for update in updates for token in update.tokens] == expected(20)


async def test_finished_requests_are_forgotten(world: Any) -> None:
    from dataclasses import replace

    await world.target()
    server = await world.router(times=replace(world.times, keep_s=0.2))
    client = await world.client(server)
    await client.generate(PROMPT, max_tokens=3, request_id="old")
    await world.until(lambda: not server.group._archive._choices, "the transcript is dropped")


# Administration.


async def test_status(world: Any) -> None:
    target = await world.target(step_s=0.01)
    draft = await world.draft()
    world.keep_in_step(target, draft)
    server = await world.router()
    await world.drafts_ready(server)
    client = await world.client(server)
    task = asyncio.create_task(client.generate(PROMPT, max_tokens=100, temperature=0, num_speculative_tokens=4))
    await world.until(lambda: len(target.proposals) > 3, "rounds have run")
    target.pause()
    status = await client.status()
    target.resume()
    assert (status["cluster"], status["router_id"], status["running"]) == (world.name, "router-0", 1)
    (group,) = status["groups"]
    assert (group["group_id"], group["epoch"], group["state"]) == ("group-0", 1, "ready")
    assert group["leader_address"] == target.address
    assert 0 < group["kv_blocks_free"] < group["kv_blocks_total"] == 256
    assert group["ranks"][0]["pid"] == 1
    assert group["steps"] > 0
    overhead = group["step_overhead"]
    assert 0 < overhead["num_steps"] <= group["steps"]
    assert overhead["overhead_ms"]["p99"] >= overhead["overhead_ms"]["p50"] > 0
    assert group["prefix_cache_queried_tokens"] == len(PROMPT)
    assert (group["prefix_cache_hit_tokens"], group["lookup_draft_tokens"], group["preemptions"]) == (0, 0, 0)
    (shown,) = status["drafts"]
    assert (shown["state"], shown["address"], shown["sessions"]) == ("ready", draft.address, 1)
    assert shown["num_accepted_tokens"] > 0
    assert status["settings"] == {"num_speculative_tokens": 4, "verifier": "coupled"}
    await task


async def test_live_settings_reach_every_router(world: Any) -> None:
    await world.target()
    first = await world.router()
    other = await world.router(wait=False, router_id="router-1")
    client, follower = await world.client(first), await world.client(other)
    assert await client.get_settings() == {"num_speculative_tokens": 4, "verifier": "coupled"}
    changed = await client.update_settings(num_speculative_tokens=2, verifier="rejection")
    assert changed == {"num_speculative_tokens": 2, "verifier": "rejection"}
    completion = await client.generate(PROMPT, max_tokens=2)
    assert completion.speculation.verifier == "rejection"
    assert len(completion.speculation.acceptance_histogram) == 3

    async def followed() -> bool:
        return (await follower.status())["settings"] == changed

    await world.until(followed, "the other router follows")
    with pytest.raises(InvalidRequest, match="num_speculative_tokens is 65"):
        await client.update_settings(num_speculative_tokens=65)
    with pytest.raises(InvalidRequest, match=r"settings.verifier is 1"):
        await client.update_settings(verifier="greedy")
    assert await client.get_settings() == changed


async def test_a_group_has_one_owner(world: Any) -> None:
    await world.target()
    await world.router()
    second = await world.router(wait=False, router_id="router-1")
    await asyncio.sleep(0.3)
    assert not second.group.is_attached


async def test_health_and_reflection(world: Any) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    server = await world.router(wait=False)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str = "") -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)).status

        assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status("liveness") == health_pb2.HealthCheckResponse.SERVING
        target = await world.target()

        async def serves() -> bool:
            return await status("outrider.v1.GenerationService") == health_pb2.HealthCheckResponse.SERVING

        await world.until(serves, "it serves")
        members = await world.registry.members("router")
        assert members["router-0"]["address"] == server.address
        await target.stop()

        async def serves_not() -> bool:
            return await status() == health_pb2.HealthCheckResponse.NOT_SERVING

        await world.until(serves_not, "it serves no more")
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in reflection.ServerReflectionInfo(requests):
            names = {service.name for service in answer.list_services_response.service}
    assert {f"outrider.v1.{name}" for name in ("GenerationService", "AdminService")} <= names
    assert "outrider.v1.GroupService" not in names  # it is not for clients


# The process.


def spawn(file: Path, redis_url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "outrider.router", "-f", str(file), "--redis", redis_url],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )


@pytest.fixture
async def process(world: Any, tmp_path: Path) -> Any:
    """Starts ``python -m outrider.router``; kills what is left."""
    started: list[subprocess.Popen[str]] = []

    async def start(**changes: Any) -> tuple[subprocess.Popen[str], str]:
        file = tmp_path / "settings.yaml"
        file.write_text(yaml.safe_dump(world.config(**changes).model_dump(mode="json")))
        router = spawn(file, world.redis_url)
        started.append(router)
        address = ""

        async def registered() -> bool:
            nonlocal address
            for record in (await world.registry.members("router")).values():
                address = record["address"] if record["pid"] == router.pid else address
            return bool(address) or router.poll() is not None

        await world.until(registered, "the router registers or ends")
        return router, address

    yield start
    for router in started:
        router.kill()
        router.communicate()


async def test_sigterm_drains(world: Any, process: Any) -> None:
    target = await world.target(step_s=0.02)
    router, address = await process()
    async with AsyncClient(address, timeout=60) as client:
        task = asyncio.create_task(client.generate(PROMPT, max_tokens=60, temperature=0))
        await world.until(lambda: target.num_steps > 3, "the request runs")
        target.pause()  # until the others were refused
        router.send_signal(signal.SIGTERM)

        async def refuses() -> bool:
            try:
                await client.generate(PROMPT, max_tokens=1)
            except Unavailable as error:
                return "shutting down" in str(error)
            return False

        await world.until(refuses, "new requests are refused")
        target.resume()
        assert list((await task).token_ids) == expected(60), "the running request did not finish"
    assert await asyncio.to_thread(router.wait, 60) == 0
    assert "router-0" not in await world.registry.members("router")
    log = await asyncio.to_thread(router.stderr.read)
    assert "attached to group-0" in log
    assert "Traceback" not in log


async def test_one_line_when_it_cannot_start(world: Any, process: Any) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        router, _ = await process(router={"port": port})
        assert await asyncio.to_thread(router.wait, 60) == 1
        last = (await asyncio.to_thread(router.stderr.read)).strip().splitlines()[-1]
        assert last.startswith(f"error: router.port: 127.0.0.1:{port} is taken")

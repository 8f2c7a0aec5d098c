"""Streams, sessions and their ends, over a real socket."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Registry
from outrider.core.fingerprint import tokenizer_fingerprint
from outrider.core.prefix import hash_tokens
from outrider.core.sampling import Sampling, Verifier
from outrider.core.wire import sampling_to_wire
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from outrider.workers.draft import server
from outrider_pings import with_quick_pings
from outrider_testbed.relay import Relay

Connect = Callable[..., Any]
Decode = Callable[..., Any]
DEADLINE_S = 60.0
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
REJECTION = Sampling(temperature=1.0, seed=5, verifier=Verifier.REJECTION)
TEXT = [5, 17, 250, 3, 99, 42, 8]


async def test_hello_names_the_draft(worker: Any, connect: Connect, model_dir: Path) -> None:
    hello = await (await connect(worker, hello=False)).hello()
    assert hello == draft_pb2.DraftHello(
        draft_id="d",
        model=str(model_dir),
        drafter="model",
        tokenizer_fingerprint=tokenizer_fingerprint(model_dir),
        vocab_size=300,
        max_model_len=2048,
        max_num_tokens=16,
    )


async def test_another_tokenizer_is_refused_with_both_fingerprints(
    worker: Any, connect: Connect, model_dir: Path
) -> None:
    """M1"""
    scheduler = await connect(worker, hello=False, fingerprint="0123abcd")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_error(scheduler, hello=True)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "0123abcd" in str(error.value.details())
    assert tokenizer_fingerprint(model_dir) in str(error.value.details())


async def read_error(scheduler: Any, *, hello: bool) -> None:
    if hello:
        await scheduler.hello()
    async with asyncio.timeout(DEADLINE_S):
        while await scheduler.call.read() is not grpc.aio.EOF:
            pass
        code = await scheduler.call.code()
        raise grpc.aio.AioRpcError(
            code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=await scheduler.call.details()
        )


@pytest.mark.parametrize("second", ["hello", None])
async def test_messages_out_of_order_end_the_stream(worker: Any, connect: Connect, second: str | None) -> None:
    scheduler = await connect(worker)
    await scheduler.open(1, TEXT, GREEDY)
    body = {} if second is None else {second: draft_pb2.SchedulerHello()}
    await scheduler.send(**body)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_error(scheduler, hello=False)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "body" in str(error.value.details())
    await worker.until(lambda batcher: not batcher.sessions)


async def test_hello_must_come_first(worker: Any, connect: Connect) -> None:
    scheduler = await connect(worker, hello=False)
    await scheduler.open(1, TEXT, GREEDY)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_error(scheduler, hello=False)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_bad_open_is_evicted_and_the_stream_goes_on(
    worker: Any, connect: Connect, plain_decode: Decode
) -> None:
    scheduler = await connect(worker)
    bad = [
        common_pb2.Sampling(temperature=1.0, top_p=1.0),  # no verifier
        common_pb2.Sampling(temperature=float("nan"), top_p=1.0, verifier=3),  # type: ignore[arg-type]
        common_pb2.Sampling(temperature=1.0, top_p=0.0, verifier=3),  # type: ignore[arg-type]
        common_pb2.Sampling(temperature=1.0, top_p=1.0, verifier=1),  # type: ignore[arg-type]
    ]
    for session_id, sampling in enumerate(bad):
        await scheduler.send(
            generation=4, open=draft_pb2.Open(session_id=session_id, tokens=TEXT, sampling=sampling, num_tokens=4)
        )
        message = await scheduler.receive()
        assert message.evicted.session_id == session_id
        assert message.header == common_pb2.Header(epoch=1, generation=4)
    await scheduler.open(9, [1, 300], GREEDY)  # 300 is outside the vocabulary, though not outside the embedding
    assert (await scheduler.receive()).evicted.session_id == 9
    await scheduler.open(10, TEXT, GREEDY)
    assert (await scheduler.proposal())[1].tokens == plain_decode(TEXT, 4, GREEDY).tokens


async def test_need_tokens(worker: Any, connect: Connect, plain_decode: Decode) -> None:
    scheduler = await connect(worker)
    await scheduler.open(1, TEXT, GREEDY)
    await scheduler.proposal()
    text = [*TEXT, 1, 2, 3, 4]
    await scheduler.commit(1, text, len(TEXT) + 2)
    message = await scheduler.receive()
    assert (message.need_tokens.session_id, message.need_tokens.from_len) == (1, len(TEXT))
    await scheduler.commit(1, text, len(TEXT))
    assert (await scheduler.proposal())[1].tokens == plain_decode(text, 4, GREEDY).tokens


async def test_same_id_again_at_once(worker: Any, connect: Connect, plain_decode: Decode) -> None:
    """V1: answers carry the generation, and the old session's Close and Commit do not touch the new one."""
    scheduler = await connect(worker)
    await scheduler.open(1, TEXT, GREEDY, generation=1)
    new_text = [7, 7, 7]
    await scheduler.open(1, new_text, GREEDY, generation=2)
    await scheduler.commit(1, [*TEXT, 1], len(TEXT), generation=1)
    await scheduler.send(generation=1, close=draft_pb2.Close(session_id=1))
    message = await scheduler.receive()
    while message.header.generation == 1:
        message = await scheduler.receive()
    assert message.header.generation == 2
    assert tuple(message.proposed.proposal.tokens) == plain_decode(new_text, 4, GREEDY).tokens
    await scheduler.commit(1, [*new_text, 1], 3, generation=2)
    assert (await scheduler.proposal())[1].tokens == plain_decode([*new_text, 1], 4, GREEDY).tokens
    await scheduler.send(generation=2, close=draft_pb2.Close(session_id=1))
    await worker.until(lambda batcher: batcher.pool.num_free == batcher.pool.num_blocks)


async def test_evicted_and_opened_again(
    start_worker: Callable[..., Any], connect: Connect, plain_decode: Decode
) -> None:
    worker = start_worker(num_kv_blocks=6, max_model_len=48)
    scheduler = await connect(worker)
    await scheduler.open(1, [1] * 30, GREEDY)
    await scheduler.proposal()
    await scheduler.open(2, [2] * 30, GREEDY)
    message = await scheduler.receive()
    assert (message.evicted.session_id, message.evicted.reason) == (2, draft_pb2.EVICTION_REASON_NO_MEMORY)
    await scheduler.send(generation=1, close=draft_pb2.Close(session_id=1))
    await scheduler.open(2, [2] * 30, GREEDY, generation=2)
    assert (await scheduler.proposal())[1].tokens == plain_decode([2] * 30, 4, GREEDY).tokens
    worker.check_integrity()


async def test_text_longer_than_the_context(
    start_worker: Callable[..., Any], connect: Connect, plain_decode: Decode
) -> None:
    """E6"""
    worker = start_worker(max_model_len=32)
    scheduler = await connect(worker)
    text = [3] * 30
    await scheduler.open(1, text, REJECTION)
    _, proposal = await scheduler.proposal()
    assert proposal.tokens == plain_decode(text, 2, REJECTION).tokens
    await scheduler.commit(1, [*text, 1, 2], 30)
    message = await scheduler.receive()
    assert (message.evicted.session_id, message.evicted.reason) == (1, draft_pb2.EVICTION_REASON_CONTEXT_FULL)
    await scheduler.open(2, [3] * 31, REJECTION)
    assert len((await scheduler.proposal())[1].tokens) == 1
    worker.check_integrity()


async def test_rows_that_are_not_finite(worker: Any, connect: Connect, plain_decode: Decode) -> None:
    """S9: the proposal ends before such a row; the session beside it, in the same steps, is not touched."""
    engine = worker.inspect(lambda batcher: batcher._drafter.engine)
    honest_forward, honest_logits = engine.forward, engine.local_logits
    bad_positions: set[int] = set()
    poisoned: list[int] = []

    def forward(batch: Any) -> torch.Tensor:
        wanted = [rows.start + len(rows.tokens) for rows in batch if rows.logits_rows]
        poisoned[:] = [index for index, position in enumerate(wanted) if position in bad_positions]
        return honest_forward(batch)

    def local_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = honest_logits(hidden).clone()
        logits[poisoned, 7] = float("nan")
        return logits

    engine.forward, engine.local_logits = forward, local_logits
    scheduler = await connect(worker)
    text, other = list(TEXT), [4] * 50
    bad_positions.add(len(text) + 2)
    for sampling, session_id in ((GREEDY, 1), (REJECTION, 2)):
        await scheduler.open(session_id, text, sampling)
        await scheduler.open(3, other, sampling, generation=session_id)
        for _ in range(2):
            answered, proposal = await scheduler.proposal()
            expected = plain_decode(other, 4, sampling) if answered == 3 else plain_decode(text, 2, sampling)
            assert proposal.tokens == expected.tokens
            assert len(proposal.rows) == len(expected.rows)
    bad_positions.update(range(45))
    await scheduler.commit(1, [*text, 9], len(text))
    # Commits that wait together are one round: the next must not come before this one's round has run.
    await worker.until(lambda batcher: any(session.invalid_rounds == 2 for session in batcher.sessions.values()))
    await scheduler.commit(1, [*text, 9, 9], len(text) + 1)
    message = await scheduler.receive()
    assert (message.evicted.session_id, message.evicted.reason) == (1, draft_pb2.EVICTION_REASON_INVALID_LOGITS)
    await scheduler.commit(3, [*other, 9], 50, generation=2)
    assert (await scheduler.proposal())[1].tokens == plain_decode([*other, 9], 4, REJECTION).tokens
    assert worker.worker.health()["state"] == "ready"


@pytest.mark.parametrize("how", ["half-close", "cancel", "channel"])
async def test_a_stream_that_ends_releases_everything(worker: Any, connect: Connect, how: str) -> None:
    stays = await connect(worker)
    await stays.open(1, TEXT, GREEDY)
    await stays.proposal()
    held = worker.inspect(lambda batcher: batcher.pool.num_free)
    leaves = await connect(worker)
    for session_id in range(5):
        await leaves.open(session_id, [session_id] * 400, GREEDY)
    await leaves.proposal()
    if how == "half-close":
        await leaves.call.done_writing()
        async with asyncio.timeout(DEADLINE_S):
            while await leaves.call.read() is not grpc.aio.EOF:
                pass
            assert await leaves.call.code() is grpc.StatusCode.OK
    elif how == "cancel":
        leaves.call.cancel()
    else:
        await leaves.channel.close()
    await worker.until(lambda batcher: len(batcher.sessions) == 1)
    assert worker.inspect(lambda batcher: batcher.pool.num_free) == held
    worker.check_integrity()
    await stays.commit(1, [*TEXT, 1], len(TEXT))
    await stays.proposal()


async def test_a_commit_is_seen_in_the_middle_of_a_long_prefill(
    start_worker: Callable[..., Any], connect: Connect, plain_decode: Decode
) -> None:
    """The engine stops in the long prompt's third step until the other session's message is there: then that session is
    answered first, and the long prompt later."""
    worker = start_worker(max_num_batched_tokens=16)
    engine = worker.inspect(lambda batcher: batcher._drafter.engine)
    compute = worker.worker._compute
    honest_forward = engine.forward
    third_step, message_is_there = threading.Event(), threading.Event()
    steps = 0

    def forward(batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 3:
            third_step.set()
            assert message_is_there.wait(DEADLINE_S)
        return honest_forward(batch)

    scheduler = await connect(worker)
    await scheduler.open(1, TEXT, GREEDY, num_tokens=0)
    await worker.until(lambda batcher: not batcher.has_work and bool(batcher.sessions))
    engine.forward = forward
    await scheduler.open(2, [1] * 1000, GREEDY)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(third_step.wait, DEADLINE_S)
        await scheduler.commit(1, [*TEXT, 1], len(TEXT))
        while compute._inbox.qsize() == 0:  # noqa: ASYNC110 - filled by a thread
            await asyncio.sleep(0.005)
    message_is_there.set()
    session_id, proposal = await scheduler.proposal()
    assert session_id == 1
    assert proposal.tokens == plain_decode([*TEXT, 1], 4, GREEDY).tokens
    assert worker.inspect(lambda batcher: batcher.sessions[(1, 2)].kv_len) < 999
    assert (await scheduler.proposal())[0] == 2


async def test_an_engine_that_fails(worker: Any, connect: Connect) -> None:
    """Streams end with UNAVAILABLE and the reason, new ones too; health says so; stop still returns."""

    def forward(batch: Any) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    scheduler = await connect(worker)
    silent = await connect(worker, hello=False)  # a stream that has not said hello yet
    async with asyncio.timeout(DEADLINE_S):
        while len(worker.worker._server._servicer._outboxes) < 2:  # noqa: ASYNC110 - filled by a thread
            await asyncio.sleep(0.005)
    worker.inspect(lambda batcher: batcher._drafter.engine).forward = forward
    await scheduler.open(1, TEXT, GREEDY)
    for one in (scheduler, silent, await connect(worker, hello=False)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_error(one, hello=False)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the device is gone" in str(error.value.details())
    health = worker.worker.health()
    assert (health["state"], health["error"]) == ("failed", "RuntimeError: the device is gone")
    stub = health_pb2_grpc.HealthStub(scheduler.channel)
    async with asyncio.timeout(DEADLINE_S):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
    worker.worker.stop()


async def test_stop_evicts_and_ends_the_streams(worker: Any, connect: Connect) -> None:
    scheduler = await connect(worker)
    await scheduler.open(1, TEXT, GREEDY, generation=3)
    await scheduler.proposal()
    await asyncio.to_thread(worker.worker.stop)
    message = await scheduler.receive()
    assert message.evicted.reason == draft_pb2.EVICTION_REASON_SHUTDOWN
    assert message.header.generation == 3
    async with asyncio.timeout(DEADLINE_S):
        assert await scheduler.call.read() is grpc.aio.EOF
    assert worker.worker.health()["state"] == "stopped"


async def test_health_and_reflection(worker: Any, connect: Connect) -> None:
    scheduler = await connect(worker)
    stub = health_pb2_grpc.HealthStub(scheduler.channel)
    for service in ("", "outrider.v1.DraftService"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(scheduler.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S)
    names = {service.name async for answer in call for service in answer.list_services_response.service}
    assert "outrider.v1.DraftService" in names


async def test_facts(worker: Any, connect: Connect) -> None:
    assert worker.worker.node()["ip"] == "127.0.0.1"
    scheduler = await connect(worker)
    await scheduler.open(1, TEXT, GREEDY)
    _, proposal = await scheduler.proposal()
    assert proposal.draft_ms > 0.0
    await worker.until(lambda batcher: True)
    health = worker.worker.health()
    assert health["state"] == "ready"
    assert (health["sessions"], health["steps"], health["proposals"]) == (1, 4, 1)
    assert health["free_blocks"] == health["blocks"] - 2
    assert health["step_ms_p50"] > 0.0


async def test_registration(start_worker: Callable[..., Any], tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        worker = start_worker(redis_url=redis.url)
        async with Registry(redis.url, "c") as registry:
            members = await registry.members("draft")
            assert members["d"]["address"] == worker.facts["address"]
            assert set(members["d"]) >= {"draft_id", "address", "model", "placement", "node", "pid"}
            await asyncio.to_thread(worker.worker.stop)
            assert await registry.members("draft") == {}
    finally:
        redis.stop()


async def test_a_scheduler_whose_host_is_gone_holds_nothing(
    start_worker: Callable[..., Any], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a host says nothing, not even that its connections end."""
    monkeypatch.setattr(server, "SERVER_OPTIONS", with_quick_pings(server.SERVER_OPTIONS))
    worker = start_worker()
    with Relay(worker.facts["address"]) as relay:
        async with grpc.aio.insecure_channel(relay.address) as channel:
            call: Any = draft_pb2_grpc.DraftServiceStub(channel).Session()
            hello = draft_pb2.SchedulerHello(
                scheduler_id="s", group_id="g", tokenizer_fingerprint=tokenizer_fingerprint(model_dir), vocab_size=300
            )
            opened = draft_pb2.Open(
                session_id=1,
                tokens=TEXT,
                prefix_len=len(TEXT),
                prefix_hash=hash_tokens(TEXT),
                sampling=sampling_to_wire(GREEDY),
                num_tokens=4,
            )
            header = common_pb2.Header(epoch=1, generation=1)
            await call.write(draft_pb2.SessionRequest(header=header, hello=hello))
            await call.write(draft_pb2.SessionRequest(header=header, open=opened))
            await worker.until(lambda batcher: bool(batcher.sessions))
            relay.delay_s = (1e6, 1e6)
            async with asyncio.timeout(40):  # less than gRPC's own timeout of pings
                await worker.until(lambda batcher: not batcher.sessions)
            call.cancel()

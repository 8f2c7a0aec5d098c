"""What a round costs beside the target's own time: a router at batch 1 against a target that takes no time.

Prints, in milliseconds, the period of steps at a stand-in target in another process (median and 99th percentile), and
the round trip of a bare bidirectional gRPC echo between the same two processes in the same minute. The difference is
what scheduling, messages and event loop add to a hop. Run it on an idle machine: ``python scripts/measure_round.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from outrider.client import AsyncClient
from outrider.cluster.config import parse_config
from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Registry
from outrider.router.server import RouterServer
from outrider.testing import StandInDraft, StandInTarget, ToyModel, write_toy_model
from outrider.testing.toy import toy_fingerprint

CLUSTER = "measure"
PROMPT = "Once upon"


class TimedTarget(StandInTarget):
    """Remembers when plans came."""

    def run(self, plan: Any) -> Any:
        self.arrivals.append(time.perf_counter())
        return super().run(plan)


async def serve(pipe: Connection, folder: Path, redis_url: str, with_draft: bool) -> None:
    """The other process: the target, a draft if wanted, and the echo."""

    async def echo(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(echo)  # bytes in, bytes out
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("measure.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    fingerprint = toy_fingerprint(folder)
    target = TimedTarget(ToyModel(), fingerprint=fingerprint, max_model_len=4096, num_blocks=2048)
    target.arrivals = []
    draft = StandInDraft(ToyModel(), fingerprint=fingerprint, max_model_len=4096)
    async with Registry(redis_url, CLUSTER, ttl_s=600.0) as registry, target, draft:
        await registry.announce("target", "g", target.record())
        if with_draft:
            await registry.announce("draft", "d", draft.record())
        pipe.send(port)
        await asyncio.to_thread(pipe.recv)
        pipe.send(target.arrivals)
    await server.stop(None)


def serve_process(pipe: Connection, folder: Path, redis_url: str, with_draft: bool) -> None:
    asyncio.run(serve(pipe, folder, redis_url, with_draft))


async def echo_times(port: int, count: int) -> list[float]:
    times = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/measure.Echo/Echo")()
        for _ in range(count):
            begun = time.perf_counter()
            await call.write(b"x" * 64)
            await call.read()
            times.append(1000 * (time.perf_counter() - begun))
        await call.done_writing()
    return times


async def measure(folder: Path, redis_url: str, pipe: Connection, port: int, args: Any) -> dict[str, Any]:
    echo = await echo_times(port, args.tokens)
    config = parse_config(
        json.dumps({"cluster": CLUSTER, "target": {"model": str(folder)}, "router": {"port": 0}}), base=folder
    )
    async with RouterServer(config, redis_url, router_id="measured") as server:
        async with asyncio.timeout(20):
            while not server.group.is_attached or (args.draft and not _draft_ready(server)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with AsyncClient(server.address, timeout=120) as client:
            await client.generate(PROMPT, max_tokens=200, temperature=0)
            begun = time.perf_counter()
            completion = await client.generate(PROMPT, max_tokens=args.tokens, temperature=0)
            total = 1000 * (time.perf_counter() - begun)
    echo += await echo_times(port, args.tokens)
    pipe.send("end")
    arrivals = await asyncio.to_thread(pipe.recv)
    steps = completion.speculation.target_calls
    periods = [1000 * (b - a) for a, b in zip(arrivals[-steps:], arrivals[-steps + 1 :], strict=False)]
    echo_p50 = statistics.median(echo)
    return {
        "steps": steps,
        "period_ms": {"p50": _r(statistics.median(periods)), "p99": _r(statistics.quantiles(periods, n=100)[-1])},
        "echo_ms": {"p50": _r(echo_p50), "p99": _r(statistics.quantiles(echo, n=100)[-1])},
        "overhead_p50_ms": _r(statistics.median(periods) - echo_p50),
        "ms_per_token": _r(total / args.tokens),
    }


def _draft_ready(server: RouterServer) -> bool:
    return server.group.drafts is not None and any(d.state == "ready" for d in server.group.drafts.drafts.values())


def _r(value: float) -> float:
    return round(value, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--draft", action="store_true", help="with a stand-in draft in the other process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_toy_model(Path(name) / "toy")
        redis = RedisServer(Path(name) / "redis")
        redis.start()
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        other = multiprocessing.get_context("spawn").Process(
            target=serve_process, args=(theirs, folder, redis.url, args.draft), daemon=True
        )
        try:
            other.start()
            port = ours.recv()
            print(json.dumps(asyncio.run(measure(folder, redis.url, ours, port, args))))
        finally:
            other.terminate()
            other.join(5)
            redis.stop()


if __name__ == "__main__":
    main()

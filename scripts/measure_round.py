"""What a round costs beside the target's own time: a router before a stand-in target, each in a process of its own.

    python scripts/measure_round.py [--tokens 1000] [--streams 256] [--stream-tokens 64] [--latency-ms 20] [--draft]
        [--plan-ahead]

Two loads in one run, and around them a bare bidirectional gRPC echo between the same machine's processes:

- One stream at a target that takes no time. T_o is the period of steps less the target's own work in each; it is given
  in milliseconds and in echoes.
- ``--streams`` streams at once at a target of fixed latency: what the router's process spends of the processor for each
  committed token (user and system time), and how busy it was.

Prints one JSON object. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from outrider.client import AsyncClient
from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Registry
from outrider.core.plan import GroupInfo
from outrider.testing import StandInDraft, StandInTarget, ToyModel, write_toy_model
from outrider.testing.toy import toy_fingerprint

CLUSTER = "measure"
PROMPT = "Once upon"
TICKS = os.sysconf("SC_CLK_TCK")
READY_S = 60.0


@dataclass
class TimedTarget(StandInTarget):
    """Remembers when plans came and, in seconds, what it did with each; holds as many sequences as are wanted."""

    max_num_seqs: int = 64
    arrivals: list[tuple[float, float]] = field(default_factory=list)

    def info(self) -> GroupInfo:
        return replace(super().info(), max_num_seqs=self.max_num_seqs)

    def run(self, plan: Any) -> Any:
        begun = time.perf_counter()
        result = super().run(plan)
        self.arrivals.append((begun, time.perf_counter() - begun))
        return result


async def serve(pipe: Connection, folder: Path, redis_url: str, args: argparse.Namespace) -> None:
    """The other side's process: the target, a draft if wanted, and the echo. Answers what the pipe asks."""

    async def echo(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(echo)  # bytes in, bytes out
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("measure.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    fingerprint = toy_fingerprint(folder)
    target = TimedTarget(
        ToyModel(),
        fingerprint=fingerprint,
        max_model_len=4096,
        num_blocks=2048 + 64 * args.streams,
        max_num_batched_tokens=max(64, 8 * args.streams),
        max_num_seqs=max(64, args.streams),
    )
    draft = StandInDraft(ToyModel(), fingerprint=fingerprint, max_model_len=4096)
    async with Registry(redis_url, CLUSTER, ttl_s=3600.0) as registry, target, draft:
        await registry.announce("target", target.group_id, target.record())
        if args.draft:
            await registry.announce("draft", draft.draft_id, draft.record())
        pipe.send(port)
        while (wish := await asyncio.to_thread(pipe.recv)) is not None:
            target.step_s = wish
            pipe.send(target.arrivals)
            target.arrivals = []
    await server.stop(None)


def serve_process(pipe: Connection, folder: Path, redis_url: str, args: argparse.Namespace) -> None:
    asyncio.run(serve(pipe, folder, redis_url, args))


@contextlib.contextmanager
def router(folder: Path, redis_url: str, args: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """A router's process."""
    limits = {"max_num_seqs": max(64, args.streams), "max_queue": max(256, args.streams)}
    target = {"model": str(folder), "max_num_seqs": limits["max_num_seqs"]}
    (folder / "cluster.yaml").write_text(
        json.dumps(
            {"cluster": CLUSTER, "target": target, "router": {"port": 0, "plan_ahead": args.plan_ahead, **limits}}
        )
    )
    words = ["-f", str(folder / "cluster.yaml"), "--redis", redis_url, "--log-level", "ERROR"]
    process = subprocess.Popen([sys.executable, "-P", "-m", "outrider.router", *words])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


async def router_address(redis_url: str, with_draft: bool) -> str:
    """Where the router listens, once it is attached to everything."""
    async with asyncio.timeout(READY_S), Registry(redis_url, CLUSTER) as registry:
        while not (routers := await registry.members("router")):  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.05)
        address: str = next(iter(routers.values()))["address"]
        async with AsyncClient(address) as client:
            while with_draft and not any(d["state"] == "ready" for d in (await client.status())["drafts"]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return address


async def echo_times(port: int, count: int) -> list[float]:
    """Milliseconds of each round trip of 64 bytes."""
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


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def ask(pipe: Connection, step_s: float) -> list[tuple[float, float]]:
    """Set the target's latency; returns the steps since the last time."""
    pipe.send(step_s)
    arrivals: list[tuple[float, float]] = await asyncio.to_thread(pipe.recv)
    return arrivals


async def measure_one(client: AsyncClient, pipe: Connection, tokens: int) -> dict[str, Any]:
    """One stream: periods of steps, less the target's own work."""
    await client.generate(PROMPT, max_tokens=200, temperature=0)
    await ask(pipe, 0.0)
    completion = await client.generate(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True)
    steps = await ask(pipe, 0.0)
    overheads = [1000 * (after[0] - before[0] - before[1]) for before, after in itertools.pairwise(steps)]
    periods = [1000 * (after[0] - before[0]) for before, after in itertools.pairwise(steps)]
    return {
        "steps": completion.speculation.target_calls,
        "tokens": completion.usage.completion_tokens,
        "period_ms": spread(periods),
        "overhead_ms": spread(overheads),
    }


async def measure_many(client: AsyncClient, pipe: Connection, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """Many streams: the router's processor time for each token."""
    options: dict[str, Any] = {"max_tokens": args.stream_tokens, "temperature": 0, "ignore_eos": True}
    await client.generate(PROMPT, **options)
    await ask(pipe, args.latency_ms / 1000)
    used, begun = processor_seconds(pid), time.perf_counter()
    answers = await asyncio.gather(*(client.generate(f"{PROMPT} {n}", **options) for n in range(args.streams)))
    wall, used = time.perf_counter() - begun, processor_seconds(pid) - used
    steps = await ask(pipe, 0.0)
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    return {
        "streams": args.streams,
        "latency_ms": args.latency_ms,
        "tokens": tokens,
        "steps": len(steps),
        "router_cpu_us_per_token": round(1e6 * used / tokens, 1),
        "router_cpu_share": round(used / wall, 3),
        "tokens_per_s": round(tokens / wall, 1),
        "target_work_ms_per_step": round(1000 * statistics.mean(step[1] for step in steps), 3),
    }


async def measure(redis_url: str, pipe: Connection, port: int, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    echo = await echo_times(port, args.tokens)
    async with AsyncClient(await router_address(redis_url, args.draft), timeout=600) as client:
        one = await measure_one(client, pipe, args.tokens)
        echo += await echo_times(port, args.tokens)
        many = await measure_many(client, pipe, pid, args) if args.streams else None
    pipe.send(None)
    one["overhead_in_echoes_p50"] = round(one["overhead_ms"]["p50"] / statistics.median(echo), 2)
    return {"echo_ms": spread(echo), "one_stream": one, "many_streams": many}


def spread(values: list[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(values), 3),
        "p99": round(statistics.quantiles(values, n=100)[-1], 3),
        "min": round(min(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="of the single stream, and echoes before and after")
    parser.add_argument("--streams", type=int, default=256, help="at once; 0: leave that part out")
    parser.add_argument("--stream-tokens", type=int, default=64, help="of each of them")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="of the target's steps for them")
    parser.add_argument("--draft", action="store_true", help="with a stand-in draft in the target's process")
    parser.add_argument("--plan-ahead", action="store_true", help="plan the next step while one runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_toy_model(Path(name) / "toy")
        redis = RedisServer(Path(name) / "redis")
        redis.start()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        other = context.Process(target=serve_process, args=(theirs, folder, redis.url, args), daemon=True)
        try:
            other.start()
            if not ours.poll(READY_S):
                sys.exit("error: the target's process did not start")
            port = ours.recv()
            with router(folder, redis.url, args) as process:
                print(json.dumps(asyncio.run(measure(redis.url, ours, port, process.pid, args))))
        finally:
            other.terminate()
            other.join(5)
            redis.stop()


if __name__ == "__main__":
    main()

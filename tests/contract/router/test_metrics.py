"""A router's metrics: on its own port and on the HTTP door, from what really happened."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.client import InvalidRequest
from outrider.metrics.declared import CONTENT_TYPE
from outrider.router.metric_names import FRONTEND, ROUTER
from outrider_promtool import promtool_check

PORTS = {"router": {"metrics_port": 0}}


class Scrape:
    """What a process told once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def sum(self, name: str) -> float:
        return sum(value for (found, _), value in self.samples.items() if found == name)


async def read(url: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as http:
        return await http.get(url)


async def scrape(url: str) -> Scrape:
    answer = await read(url)
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    return Scrape(answer.text)


def names(text: str) -> set[str]:
    """Of the families, as they are declared."""
    lines = [line.split() for line in text.splitlines() if line.startswith("# TYPE ")]
    return {line[2] for line in lines}


async def test_all_that_is_declared_is_told_and_nothing_else(world: Any) -> None:
    server = await world.router(wait=False, **PORTS)
    told = names((await scrape(server.metrics_url)).text)
    assert told >= {metric.name for metric in FRONTEND}
    await world.target()
    await world.until(lambda: server.group.is_attached, "the router attaches")
    told = await scrape(server.metrics_url)
    assert names(told.text) == {metric.name for metric in ROUTER}
    assert names((await read(server.http_url.replace("/v1", "/metrics"))).text) == names(told.text)


async def test_counts_are_those_of_the_answers(world: Any) -> None:
    target = await world.target()
    world.keep_in_step(target, await world.draft())
    server = await world.router(**PORTS)
    await world.drafts_ready(server)
    client = await world.client(server)
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "num_speculative_tokens": 4}
    answers = [await client.generate(f"text {number}", **asked) for number in range(3)]
    with pytest.raises(InvalidRequest):
        await client.generate("x", max_tokens=0)

    async def all_ended() -> bool:  # a client may leave a moment before the router closes its stream
        return (await scrape(server.metrics_url))("outrider_e2e_request_latency_seconds_count") == 3

    await world.until(all_ended, "three requests have ended")
    told = await scrape(server.metrics_url)
    spec = [answer.speculation for answer in answers]
    assert told("outrider_spec_decode_num_drafts_total") == sum(one.num_spec_steps for one in spec) > 0
    assert told("outrider_spec_decode_num_draft_tokens_total") == sum(one.num_draft_tokens for one in spec)
    accepted = sum(one.num_accepted_tokens for one in spec)
    assert told("outrider_spec_decode_num_accepted_tokens_total") == accepted > 0
    assert told.sum("outrider_spec_decode_num_accepted_tokens_per_pos_total") == accepted
    for position in range(4):
        at_least = sum(sum(one.acceptance_histogram[position + 1 :]) for one in spec)
        assert told("outrider_spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == at_least
    assert told("outrider_generation_tokens_total") == 72
    assert told("outrider_prompt_tokens_total") == sum(answer.usage.prompt_tokens for answer in answers)
    assert told("outrider_request_success_total", finished_reason="length") == 3
    assert told("outrider_request_errors_total", code="INVALID_ARGUMENT") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert told(f"outrider_{name}_count") == 3
    # Each token but the first message's has a share of a gap.
    assert told("outrider_time_per_output_token_seconds_count") <= 72 - 3
    gaps = told("outrider_inter_token_latency_seconds_count")
    assert 0 < gaps <= told("outrider_time_per_output_token_seconds_count")
    assert told("outrider_time_per_output_token_seconds_sum") == pytest.approx(
        told("outrider_inter_token_latency_seconds_sum")
    )
    steps = told.sum("outrider_step_time_seconds_count")
    assert steps == told("outrider_step_overhead_seconds_count") == server.group.scheduler.snapshot().num_steps
    assert told("outrider_round_time_seconds_count") <= told("outrider_spec_decode_num_drafts_total")
    assert told("outrider_draft_workers", state="ready") == 1
    assert told("outrider_num_requests_running") == told("outrider_num_requests_waiting") == 0


async def test_what_clients_send_makes_no_new_series(world: Any) -> None:
    await world.target()
    server = await world.router(**PORTS)
    client = await world.client(server)
    before = (await scrape(server.metrics_url)).samples.keys()
    for number in range(5):
        await client.generate(f"text {number}", request_id=f"a-name-of-its-own-{number}", max_tokens=2 + number)
        with pytest.raises(InvalidRequest):
            await client.generate("x", max_tokens=-number)
    assert (await scrape(server.metrics_url)).samples.keys() == before


async def test_a_client_that_goes_away_counts_as_an_abort(world: Any) -> None:
    target = await world.target()
    server = await world.router(times=world.patient, **PORTS)
    client = await world.client(server, timeout=120.0)
    target.pause(after=2)  # there is text, and more to come
    async with client.stream("text", max_tokens=200, ignore_eos=True) as stream:
        await anext(aiter(stream))
        told = await scrape(server.metrics_url)
        assert told("outrider_num_requests_running") == told("outrider_num_requests_open") == 1

    async def aborted() -> bool:
        return (await scrape(server.metrics_url))("outrider_request_success_total", finished_reason="abort") == 1

    await world.until(aborted, "the abort is counted")
    target.resume()
    assert (await scrape(server.metrics_url))("outrider_e2e_request_latency_seconds_count") == 0


async def test_the_kubelet_hears_whether_it_lives_and_is_ready(world: Any) -> None:
    server = await world.router(wait=False, **PORTS)
    base = server.metrics_url.removesuffix("/metrics")
    assert (await read(f"{base}/livez")).status_code == 200
    answer = await read(f"{base}/readyz")
    assert (answer.status_code, answer.text) == (503, "waiting for a target\n")
    await world.target()

    async def ready() -> bool:
        return (await read(f"{base}/readyz")).status_code == 200

    await world.until(ready, "the router is ready")
    stopping = asyncio.create_task(server.stop(0.0))
    await stopping
    with pytest.raises(httpx.TransportError):
        await read(f"{base}/livez")


async def test_a_port_that_is_taken_is_named(world: Any) -> None:
    from outrider.core.errors import ConfigError

    server = await world.router(wait=False, **PORTS)
    port = httpx.URL(server.metrics_url).port
    with pytest.raises(ConfigError, match=rf"router\.metrics_port: cannot listen on 127\.0\.0\.1:{port}"):
        await world.router(wait=False, router_id="router-1", router={"metrics_port": port})


async def test_promtool_finds_no_fault(world: Any) -> None:
    await world.target()
    await world.draft()
    server = await world.router(**PORTS)
    await world.drafts_ready(server)
    client = await world.client(server)
    await client.generate("text", max_tokens=8)
    promtool_check((await scrape(server.metrics_url)).text)

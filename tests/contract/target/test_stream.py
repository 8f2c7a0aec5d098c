"""The stream of plans as a scheduler meets it: attach, take-over, stale epochs, what is not supported, health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.cluster.redis_server import RedisServer
from outrider.cluster.registry import Registry
from outrider.core.plan import PlanKind, SequenceError, SequencePlan, StepPlan
from outrider.core.sampling import Sampling, Verifier
from outrider.core.wire import plan_to_wire
from outrider.v1 import target_pb2

GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
FIRST = SequencePlan(
    seq_id=1, generation=1, kv_len=0, tokens=(1, 2, 3), block_append=(0, 1), logits_rows=(2,), sampling=GREEDY
)
NEXT = SequencePlan(seq_id=1, generation=1, kv_len=3, tokens=(4,), block_keep=2, logits_rows=(0,))
SERVICE = "outrider.v1.TargetService"


@pytest.fixture(scope="module")
def group(model_dir: str, group_class: Any) -> Iterator[Any]:
    """One rank is enough here: what the ranks say to each other is tested elsewhere."""
    group = group_class(model_dir, 1)
    yield group
    group.stop()


def test_attach_comes_first(group: Any, client_class: Any) -> None:
    client = client_class(group.address, attach=False)
    client.send(plan=plan_to_wire(StepPlan(7, 1, (FIRST,))))
    assert client.error() == (grpc.StatusCode.FAILED_PRECONDITION, "the first message of a stream must be attach")


def test_attach_clears_every_sequence(group: Any, client: Any) -> None:
    assert client.run(StepPlan(7, 1, (FIRST,))).sequences[0].error is None
    assert client.run(StepPlan(7, 2, (NEXT,))).sequences[0].error is None
    client.close()
    again = group.attach()
    answer = again.run(StepPlan(7, 3, (NEXT,)))
    assert answer.sequences[0].error is SequenceError.INVALID_PLAN
    assert answer.ranks[0].num_sequences == 0
    again.close()


def test_a_second_stream_ends_the_first(group: Any, client: Any) -> None:
    assert client.run(StepPlan(7, 1, (FIRST,))).sequences[0].error is None
    second = group.attach()
    assert client.error() == (grpc.StatusCode.ABORTED, "scheduler 'script' took the group over")
    assert second.run(StepPlan(7, 1, (FIRST,))).sequences[0].error is None
    second.close()


def test_many_streams_come_and_go(group: Any) -> None:
    """Whoever attached last is served, and the group survives the others."""
    clients = [group.attach() for _ in range(8)]
    for old in clients[:-1]:
        assert old.error()[0] is grpc.StatusCode.ABORTED
    assert clients[-1].run(StepPlan(7, 1, (FIRST,))).sequences[0].error is None
    for client in clients:
        client.close()


def test_plans_may_be_sent_ahead(group: Any, client: Any) -> None:
    """Results come in order, one for each plan."""
    plans = [StepPlan(7, 1, (FIRST,)), *(StepPlan(7, step, (NEXT,)) for step in range(2, 8))]
    for plan in plans:
        client.send(plan=plan_to_wire(plan))
    answers = [client.receive().result for _ in plans]
    assert [answer.step for answer in answers] == [plan.step for plan in plans]
    assert len({tuple(answer.sequences[0].committed) for answer in answers[1:]}) == 1


def test_a_stale_attach_is_dropped(group: Any, client: Any, client_class: Any) -> None:
    stale = client_class(group.address, epoch=6, attach=False)
    stale.send(attach=target_pb2.Attach(scheduler_id="old"))
    code, message = stale.error()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert message == "a message of epoch 6 was dropped: the group g0 is at epoch 7"
    assert client.run(StepPlan(7, 1, (FIRST,))).sequences[0].error is None


def test_a_stale_plan_is_dropped(client: Any) -> None:
    client.send(plan=plan_to_wire(StepPlan(7, 1, (FIRST,))), epoch=6)
    assert client.error()[0] is grpc.StatusCode.FAILED_PRECONDITION


UNSUPPORTED = {
    "kind": replace(StepPlan(7, 1, (FIRST,)), kind=PlanKind.DRAFT, draft_layers=(0,)),
    "layers": replace(StepPlan(7, 1, (FIRST,)), draft_layers=(0,)),
    "feature_layers": replace(StepPlan(7, 1, (FIRST,)), feature_layers=(1,)),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_supported_is_refused(client: Any, case: str) -> None:
    client.send(plan=plan_to_wire(UNSUPPORTED[case]))
    code, message = client.error()
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "not supported by this group" in message


def test_a_plan_is_made_after_the_one_before_it(group: Any, client: Any) -> None:
    """Else nobody knows what its positions are relative to."""
    client.send(plan=plan_to_wire(StepPlan(7, 1, (FIRST,), after_step=0)))
    assert client.error() == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "plan 1: after_step is 0, but the plan was the first one of its stream",
    )
    again = group.attach()
    again.send(plan=plan_to_wire(StepPlan(7, 4, (FIRST,))))
    again.send(plan=plan_to_wire(StepPlan(7, 6, (replace(NEXT, kv_len=0, tokens=()),), after_step=5)))
    assert again.receive().result.step == 4
    assert again.error() == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "plan 6: after_step is 5, but the plan was sent after plan 4",
    )
    again.close()


def test_trees_are_refused_for_their_sequence(client: Any) -> None:
    tree = replace(FIRST, tokens=(1, 2, 3), num_proposal_tokens=2, parents=(-1, -1), logits_rows=(0, 1, 2))
    other = replace(FIRST, seq_id=2, block_append=(2, 3))
    answer = client.run(StepPlan(7, 1, (tree, other)))
    assert [item.error for item in answer.sequences] == [SequenceError.INVALID_PLAN, None]
    assert "chains only" in answer.sequences[0].error_message


@pytest.mark.parametrize(
    "plan",
    [
        target_pb2.StepPlan(step=1),
        target_pb2.StepPlan(step=1, kind=99),
        target_pb2.StepPlan(step=1, kind=1, sequences=[{"seq_id": 1, "tokens": [1], "sampling": {"temperature": 1.0}}]),
    ],
)
def test_what_is_not_understood_is_refused(client: Any, plan: target_pb2.StepPlan) -> None:
    client.send(plan=plan)
    assert client.error()[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_client_that_vanishes_in_a_step_does_no_harm(group: Any) -> None:
    for _ in range(5):
        client = group.attach()
        client.send(plan=plan_to_wire(StepPlan(7, 1, (FIRST,))))
        client.close()
    last = group.attach()
    assert last.run(StepPlan(7, 1, (FIRST,))).sequences[0].error is None
    last.close()


def test_registration(group_class: Any, group_failed: type[Exception], model_dir: str, tmp_path: Path) -> None:
    """The leader is in the registry while it serves, and not after that."""
    redis = RedisServer(tmp_path)
    redis.start()
    try:

        async def members() -> dict[str, Any]:
            async with Registry(redis.url, "test") as registry:
                return await registry.members("target")

        group = group_class(model_dir, 1, redis_url=redis.url)
        record = asyncio.run(members())["g0"]
        assert record["address"] == group.address
        assert (record["group_id"], record["epoch"], record["model"], record["dtype"]) == (
            "g0",
            7,
            model_dir,
            "float32",
        )
        assert record["tensor_parallel_size"] == 1
        assert [(rank["rank"], rank["pid"]) for rank in record["ranks"]] == [(0, group.ranks[0].process.pid)]
        group.stop()
        assert asyncio.run(members()) == {}

        group = group_class(model_dir, 1, redis_url=redis.url, fault="broken")
        client = group.attach()
        answers = [client.run(StepPlan(7, step, (replace(FIRST, seq_id=step),))) for step in (1, 2)]
        assert len(answers) == 2
        with pytest.raises(group_failed, match="no memory left"):
            client.run(StepPlan(7, 3, ()))
        deadline = time.monotonic() + 60
        while asyncio.run(members()):
            assert time.monotonic() < deadline
        group.stop()
    finally:
        redis.stop()


def test_health_and_reflection(group: Any) -> None:
    with grpc.insecure_channel(group.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (listed,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=60)
        assert SERVICE in {service.name for service in listed.list_services_response.service}

"""What goes wrong, and that it is said within a bounded time: nobody hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.core.plan import SequenceError, SequencePlan, StepPlan
from outrider.core.sampling import Sampling, Verifier

DEADLINE_S = 60.0
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
COUPLED = Sampling(temperature=0.9, seed=3, verifier=Verifier.COUPLED)
FILTERED = Sampling(temperature=0.9, top_k=20, seed=3, verifier=Verifier.COUPLED)
REJECTION = Sampling(temperature=0.9, seed=3, verifier=Verifier.REJECTION)
StartGroup = Callable[..., Any]


def first(seq_id: int, tokens: tuple[int, ...], sampling: Sampling, blocks: tuple[int, ...]) -> SequencePlan:
    return SequencePlan(
        seq_id=seq_id,
        generation=1,
        kv_len=0,
        tokens=tokens,
        block_append=blocks,
        logits_rows=(len(tokens) - 1,),
        sampling=sampling,
    )


def run_until_failure(client: Any, failed: type[Exception]) -> str:
    """Decode until the group fails; the failure's text."""

    def decode() -> None:
        for step in range(1, 10_000):
            client.run(StepPlan(client.epoch, step, (first(1, (1, 2, 3), GREEDY, (0,)),)))

    with pytest.raises(failed) as caught:
        decode()
    code, message = client.error()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert message == str(caught.value)
    return message


def wait_for_state(rank: Any, state: str) -> dict[str, Any]:
    end = time.monotonic() + DEADLINE_S
    while (health := rank.call("health", timeout=DEADLINE_S))["state"] != state:
        assert time.monotonic() < end, health
        time.sleep(0.05)
    return health


def wait_until_not_serving(address: str) -> None:
    end = time.monotonic() + DEADLINE_S
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status != (
            health_pb2.HealthCheckResponse.NOT_SERVING
        ):
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize("local_size", [2, 1])
def test_a_killed_rank(start_group: StartGroup, group_failed: type[Exception], local_size: int) -> None:
    """SIGKILL between and within steps: GroupFailure, then UNAVAILABLE, and the leader goes on answering."""
    group = start_group(2, local_size=local_size)
    client = group.attach()
    client.run(StepPlan(client.epoch, 1, (first(1, (1, 2, 3), GREEDY, (0,)),)))
    group.ranks[1].process.kill()
    message = run_until_failure(client, group_failed)
    assert "rank 1" in message or "lost" in message or "closed" in message
    health = wait_for_state(group.ranks[0], "failed")
    assert health["message"] == message
    late = group.attach_only()
    assert late.error() == (grpc.StatusCode.UNAVAILABLE, f"the group failed: {message}")
    wait_until_not_serving(group.address)
    group.ranks[0].call("stop", timeout=DEADLINE_S)


def test_a_rank_killed_while_nothing_runs(start_group: StartGroup, group_failed: type[Exception]) -> None:
    group = start_group(2)
    client = group.attach()
    group.ranks[1].process.kill()
    with pytest.raises(group_failed, match="rank 1 was lost"):
        client.receive()  # the client did not send anything


@pytest.mark.parametrize("local_size", [2, 1])
def test_a_killed_leader(start_group: StartGroup, local_size: int) -> None:
    group = start_group(2, local_size=local_size)
    client = group.attach()
    client.run(StepPlan(client.epoch, 1, (first(1, (1, 2, 3), GREEDY, (0,)),)))
    group.ranks[0].kill()
    assert client.error()[0] is grpc.StatusCode.UNAVAILABLE
    message = wait_for_state(group.ranks[1], "failed")["message"]
    assert "rank 0 was lost" in message or "rank 1 lost its control connection" in message
    group.ranks[1].call("stop", timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("forgetful", "rank 1 disagrees about what is committed"),
        ("lying", "rank 1 disagrees about what is committed"),
        ("broken", "rank 1: MemoryError: no memory left"),
    ],
)
def test_a_rank_out_of_step_stops_the_group(
    start_group: StartGroup, group_failed: type[Exception], fault: str, message: str
) -> None:
    """Planted: a rank that lost a position, one that only reports another checksum, one that raises."""
    group = start_group(2, fault=fault)
    client = group.attach()
    prompt = first(1, (1, 2, 3), GREEDY, (0, 1))
    steps = []

    def decode() -> None:
        for step in range(8):
            tail = SequencePlan(1, 1, 2 + step, (4,), 2, logits_rows=(0,))
            client.run(StepPlan(client.epoch, step, (prompt if step == 0 else tail,)))
            steps.append(step)

    with pytest.raises(group_failed, match=message):
        decode()
    assert len(steps) == (2 if fault == "broken" else 3)
    for rank in group.ranks:
        assert message in wait_for_state(rank, "failed")["message"]


def test_a_step_that_takes_too_long(start_group: StartGroup, group_failed: type[Exception]) -> None:
    group = start_group(2, fault="slow", step_timeout_s=10.0)
    message = run_until_failure(group.attach(), group_failed)
    assert message == "step 3 took longer than step_timeout_s = 10"
    assert wait_for_state(group.ranks[0], "failed")["message"] == message


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_row_that_is_not_a_number_concerns_its_sequence(
    start_group: StartGroup, tmp_path: Path, world_size: int, make_target_model: Any, oracle_class: Any
) -> None:
    """Case S8, with every way to verify; then the poisoned blocks go to another sequence."""
    model = make_target_model(tmp_path, nan_token=299)
    group = start_group(world_size, model=model)
    oracle = oracle_class(model)
    client = group.attach()
    settings = (GREEDY, COUPLED, FILTERED, REJECTION)
    good = [first(1 + i, (5, 6, 7), sampling, (2 * i,)) for i, sampling in enumerate(settings)]
    bad = [first(11 + i, (5, 299, 7), sampling, (2 * i + 1,)) for i, sampling in enumerate(settings)]
    plan = StepPlan(client.epoch, 1, tuple(item for pair in zip(bad, good, strict=True) for item in pair))
    answers = {answer.seq_id: answer for answer in client.run(plan).sequences}
    for item in bad:
        assert answers[item.seq_id].error is SequenceError.INVALID_LOGITS
        assert answers[item.seq_id].committed == ()
        assert "logits for position 3" in answers[item.seq_id].error_message
    for item in good:
        expected = oracle.outcome([5, 6, 7], (), (), item.sampling).next_token
        assert answers[item.seq_id].committed == (expected,), answers[item.seq_id].error_message
    heirs = [first(21 + i, (8, 9), sampling, (2 * i + 1,)) for i, sampling in enumerate(settings)]
    result = client.run(StepPlan(client.epoch, 2, tuple(heirs), released=tuple(item.seq_id for item in bad)))
    for item, answer in zip(heirs, result.sequences, strict=True):
        assert answer.committed == (oracle.outcome([8, 9], (), (), item.sampling).next_token,)
    client.close()
    group.stop()


def test_a_rejected_row_is_not_looked_at(
    start_group: StartGroup, tmp_path: Path, make_target_model: Any, oracle_class: Any
) -> None:
    """A proposal that poisons its own rows is rejected like any other: the row before it is sound."""
    model = make_target_model(tmp_path, nan_token=299)
    client = start_group(1, model=model).attach()
    for step, sampling in enumerate((GREEDY, COUPLED, FILTERED)):
        plan = SequencePlan(
            seq_id=step,
            generation=1,
            kv_len=0,
            tokens=(5, 6, 299),
            block_append=(step,),
            num_proposal_tokens=1,
            logits_rows=(1, 2),
            sampling=sampling,
        )
        answer = client.run(StepPlan(client.epoch, step, (plan,))).sequences[0]
        assert answer.error is None
        assert answer.num_accepted == 0
        assert answer.committed == (oracle_class(model).outcome([5, 6], (), (), sampling).next_token,)


def test_ranks_with_different_models_do_not_start(model_dir: str, group_class: Any) -> None:
    with pytest.raises(RuntimeError, match="loaded another model or other settings than rank 0"):
        group_class(model_dir, 2, last={"max_num_batched_tokens": 32})

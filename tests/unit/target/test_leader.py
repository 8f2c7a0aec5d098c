"""The threads of leader and follower over a stand-in for the engine: order, failure, endings."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.errors import GroupError
from outrider.core.plan import SequencePlan, StepPlan
from outrider.core.sampling import Sampling, Verifier
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.parallel import Parallel
from outrider.workers.target.channel import ChannelClosed
from outrider.workers.target.codec import MessageKind, decode
from outrider.workers.target.follower import Follower
from outrider.workers.target.leader import Leader
from outrider.workers.target.state import Limits, SequenceTable
from outrider.workers.target.step import RankStep

LIMITS = Limits(vocab_size=10, max_model_len=64, num_blocks=16, block_size=4, max_num_batched_tokens=20, max_num_seqs=8)
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)


class NextNumber:
    """A model that says: the token after v is v + 1."""

    vocab_offset = 0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.running = threading.Event()
        self.error: Exception | None = None

    def forward(self, batch: Sequence[SequenceRows]) -> Tensor:
        self.running.set()
        assert self.hold.wait(timeout=60)
        if self.error is not None:
            raise self.error
        return torch.tensor([[float(rows.tokens[row])] for rows in batch for row in rows.logits_rows])

    def local_logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, 10).float()

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        return local_logits


class Recorder:
    """A channel whose other end is the test."""

    def __init__(self, keep_alive_s: float | None = None) -> None:
        self.keep_alive_s = keep_alive_s
        self.sent: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()

    def send(self, values: np.ndarray) -> None:
        self.sent.put(values)

    def receive(self) -> np.ndarray:
        values = self.sent.get(timeout=60)
        if values is None:
            raise ChannelClosed("closed")
        return values

    def abort(self) -> None:
        self.sent.put(None)

    def close(self) -> None:
        self.abort()


def plan(step: int, tokens: tuple[int, ...] = (3, 4, 5, 7)) -> StepPlan:
    rows = (0, 1, 2, 3)
    sequence = SequencePlan(step, 1, 0, tokens, 0, (0,), 3, logits_rows=rows, sampling=GREEDY)
    return StepPlan(1, step, (sequence,))


def rank(engine: NextNumber) -> RankStep:
    return RankStep(engine, Parallel.single(), SequenceTable(LIMITS))


@pytest.fixture
def engine() -> NextNumber:
    return NextNumber()


@pytest.fixture
def leader(engine: NextNumber) -> Iterator[Leader]:
    leader = Leader(rank(engine), Recorder())
    leader.start()
    yield leader
    engine.hold.set()
    assert leader.stop()


def test_results_come_in_order(leader: Leader) -> None:
    futures = [leader.submit(plan(step)) for step in range(5)]
    results = [future.result(timeout=60) for future in futures]
    assert [result.step for result in results if result] == list(range(5))
    assert {result.sequences[0].committed for result in results if result} == {(4, 5, 6)}  # 7 is rejected
    assert leader.steps == 5


def test_reset_forgets(leader: Leader) -> None:
    leader.submit(plan(1)).result(timeout=60)
    leader.reset().result(timeout=60)
    result = leader.submit(StepPlan(1, 2, ())).result(timeout=60)
    assert result is not None
    assert result.ranks[0].num_sequences == 0


def test_a_step_that_raises_fails_the_group(leader: Leader, engine: NextNumber) -> None:
    heard: list[str] = []
    leader.on_failure(heard.append)
    engine.error = MemoryError("no memory")
    engine.hold.clear()
    futures = [leader.submit(plan(step)) for step in (1, 2)]
    engine.hold.set()
    for future in futures:
        with pytest.raises(GroupError, match="step 1 failed: MemoryError: no memory"):
            future.result(timeout=60)
    with pytest.raises(GroupError, match="step 1 failed"):
        leader.submit(plan(3)).result(timeout=60)
    leader.on_failure(heard.append)
    assert heard == ["step 1 failed: MemoryError: no memory"] * 2


def test_a_failure_from_outside_answers_a_step_that_hangs(leader: Leader, engine: NextNumber) -> None:
    engine.hold.clear()
    future = leader.submit(plan(1))
    assert engine.running.wait(timeout=60)
    leader.fail("rank 1 was lost")
    leader.fail("something else")
    with pytest.raises(GroupError, match="rank 1 was lost"):
        future.result(timeout=30)
    assert leader.failure == "rank 1 was lost"
    assert not leader.stop(deadline_s=0.05), "the thread is stuck, and stop says so"


def test_an_idle_leader_says_that_it_is_there(engine: NextNumber) -> None:
    channel = Recorder(keep_alive_s=0.02)
    leader = Leader(rank(engine), channel)
    leader.start()
    for _ in range(3):
        assert decode(channel.receive()).kind is MessageKind.KEEP_ALIVE
    assert leader.stop()
    while (kind := decode(channel.receive()).kind) is MessageKind.KEEP_ALIVE:
        pass
    assert kind is MessageKind.STOP


def test_a_follower_holds_what_the_leader_holds(engine: NextNumber) -> None:
    channel = Recorder()
    leading, following = rank(engine), rank(NextNumber())
    failures: list[str] = []
    follower = Follower(following, channel, 1, failures.append)
    leader = Leader(leading, channel)
    follower.start()
    leader.start()
    for step in range(3):
        leader.submit(plan(step)).result(timeout=60)
    assert leader.stop()
    assert follower.stop()
    assert (follower.stopped, follower.failure, failures) == (True, None, [])
    assert follower.steps == 3
    assert following.table.sequences == leading.table.sequences


def test_a_follower_out_of_step_runs_nothing(engine: NextNumber) -> None:
    channel = Recorder()
    model = NextNumber()
    following = rank(model)
    failures: list[str] = []
    follower = Follower(following, channel, 1, failures.append)
    leader = Leader(rank(engine), channel)
    leader.start()
    leader.submit(plan(1)).result(timeout=60)
    following.table.apply(plan(77))  # what the leader never said
    follower.start()
    follower.stop(patience_s=10)
    assert len(failures) == 1
    assert "rank 1 disagrees about what is committed" in failures[0]
    assert not model.running.is_set()
    assert leader.stop()

"""A target group in real processes, and a scripted scheduler that talks to it over gRPC."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from outrider.cluster.config import TargetConfig
from outrider.core.block_pool import BlockPool
from outrider.core.logprobs import TokenLogprobs
from outrider.core.plan import GroupInfo, SequencePlan, SequenceResult, StepPlan, StepResult
from outrider.core.sampling import Sampling
from outrider.core.wire import group_info_from_wire, plan_to_wire, result_from_wire
from outrider.grammar import Matcher
from outrider.kernels.batched.data import Chain, Outcome
from outrider.kernels.reference.chain import verify_one
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.parallel import Parallel
from outrider_testbed import WarmPython

HERE = Path(__file__).parent
VOCAB_SIZE = 300
EPOCH = 7
NAN_TOKEN = 299


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_model(folder: Path, *, nan_token: int | None = None) -> str:
    """A tiny random Qwen2 with a tokenizer. ``nan_token``: its embedding is not a number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=304,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config)
    if nan_token is not None:
        model.get_input_embeddings().weight.data[nan_token, 3] = torch.nan
    model.save_pretrained(folder)
    vocab = {f"w{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(vocab, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("qwen2"))


def settings_of(model: str, **changes: Any) -> dict[str, Any]:
    values = {
        "model": model,
        "block_size": 4,
        "num_kv_blocks": 64,
        "max_model_len": 128,
        "max_num_batched_tokens": 48,
        "num_threads": 1,
        "device": "cpu",
    }
    return {**values, **changes}


class Rank:
    """A rank's process."""

    def __init__(self, python: WarmPython, settings: dict[str, Any]) -> None:
        key = secrets.token_hex(8)
        environment = {**os.environ, "RANK_KEY": key, "OMP_NUM_THREADS": "1"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        with Listener(family="AF_UNIX", authkey=key.encode()) as listener:
            listener._listener._socket.settimeout(120)  # type: ignore[attr-defined]
            self.process = python.start(
                HERE / "rank_process.py",
                [str(listener.address), json.dumps(settings)],
                environment=environment,
                log=self.log,
                rank=settings["rank"],
            )
            self.connection: Connection = listener.accept()

    def call(self, method: str, *args: Any, timeout: float = 240.0) -> Any:
        self.connection.send((method, args))
        if not self.connection.poll(timeout):
            raise TimeoutError(f"{method} took more than {timeout} s\n{self.tail()}")
        status, value = self.connection.recv()
        if status == "error":
            raise RuntimeError(value)
        return value

    def tail(self) -> str:
        self.log.seek(0)
        return self.log.read()[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)


class Group:
    """A started group."""

    def __init__(
        self, python: WarmPython, model: str, world_size: int, *, local_size: int | None = None, **options: Any
    ) -> None:
        fault = options.pop("fault", None)
        redis_url = options.pop("redis_url", None)
        last = options.pop("last", {})  # settings of the last rank that differ
        config = settings_of(model, tensor_parallel_size=world_size, **options)
        self.world_size = world_size

        def settings(rank: int) -> dict[str, Any]:
            is_last = rank == world_size - 1
            planted = {"fault": fault} if is_last and fault else {}
            base = {
                "config": {**config, **(last if is_last else {})},
                "group_id": "g0",
                "rank": rank,
                "epoch": EPOCH,
                "redis_url": redis_url,
            }
            return {**base, **planted}

        with ThreadPoolExecutor(world_size) as pool:
            self.ranks = list(pool.map(lambda rank: Rank(python, settings(rank)), range(world_size)))
            try:
                host, port = self.ranks[0].call("reserve")
                size = world_size if local_size is None else local_size
                self.facts = list(pool.map(lambda rank: rank.call("start", host, port, size), self.ranks))
            except BaseException:
                self.kill()
                raise
        self.address: str = self.facts[0]["address"]

    def attach(self, epoch: int = EPOCH) -> Client:
        return Client(self.address, epoch)

    def attach_only(self) -> Client:
        """A stream that asked to attach and did not wait for the answer."""
        client = Client(self.address, EPOCH, attach=False)
        client.send(attach=target_pb2.Attach(scheduler_id="late"))
        return client

    def stop(self) -> None:
        """In peace, and in the order that the supervisor would take. Every process must end by itself."""
        try:
            for rank in self.ranks:
                rank.call("stop", timeout=60)
                rank.connection.close()
            codes = [rank.process.wait(timeout=90) for rank in self.ranks]
            assert codes == [0] * self.world_size, "\n".join(rank.tail() for rank in self.ranks)
        finally:
            self.kill()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.log.close()


class GroupFailed(Exception):
    """The leader sent GroupFailure."""


class Client:
    """One stream of plans, as a scheduler holds it. Every wait has a deadline."""

    def __init__(self, address: str, epoch: int = EPOCH, *, attach: bool = True) -> None:
        self.epoch = epoch
        self._channel = grpc.insecure_channel(address)
        self._requests: queue.SimpleQueue[target_pb2.StepsRequest | None] = queue.SimpleQueue()
        self.call: Any = target_pb2_grpc.TargetServiceStub(self._channel).Steps(
            iter(self._requests.get, None), timeout=120
        )
        self.info: GroupInfo | None = None
        if attach:
            self.send(attach=target_pb2.Attach(scheduler_id="script"))
            response = self.receive()
            self.info = group_info_from_wire(response.attached)

    def send(self, *, epoch: int | None = None, **body: Any) -> None:
        header = common_pb2.Header(epoch=self.epoch if epoch is None else epoch)
        self._requests.put(target_pb2.StepsRequest(header=header, **body))

    def receive(self) -> target_pb2.StepsResponse:
        response: target_pb2.StepsResponse = next(self.call)
        if response.WhichOneof("body") == "failure":
            raise GroupFailed(response.failure.message)
        return response

    def run(self, plan: StepPlan) -> StepResult:
        self.send(plan=plan_to_wire(plan))
        response = self.receive()
        assert response.header.epoch == self.epoch
        return result_from_wire(response.header.epoch, response.result)

    def error(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self.call)
        return caught.value.code(), caught.value.details()

    def close(self) -> None:
        self._requests.put(None)
        self.call.cancel()
        self._channel.close()


class Steps:
    """Numbers the plans of one stream and commits what comes back."""

    def __init__(self, client: Client, world_size: int) -> None:
        self.client = client
        self.world_size = world_size
        self.step = 0

    def run(self, *plans: tuple[Sequence, SequencePlan], released: tuple[int, ...] = ()) -> StepResult:
        result = self.ask(*(plan for _, plan in plans), released=released)
        timing = result.timing
        assert 0 < timing.forward_ms < timing.total_ms
        assert timing.plan_ms + timing.forward_ms + timing.verify_ms == pytest.approx(timing.total_ms, abs=0.01)
        for (sequence, sequence_plan), answer in zip(plans, result.sequences, strict=True):
            sequence.take(sequence_plan, answer)
        return result

    def ask(self, *plans: SequencePlan, released: tuple[int, ...] = ()) -> StepResult:
        """The same without committing."""
        self.step += 1
        result = self.client.run(StepPlan(self.client.epoch, self.step, plans, released))
        assert result.step == self.step
        assert [report.rank for report in result.ranks] == list(range(self.world_size))
        assert len({(report.num_sequences, report.committed_checksum) for report in result.ranks}) == 1
        return result


class Sequence:
    """A scripted request: what is committed, and what the group holds of it."""

    def __init__(
        self, seq_id: int, prompt: list[int], sampling: Sampling, pool: BlockPool, generation: int = 1
    ) -> None:
        self.seq_id, self.generation = seq_id, generation
        self.tokens = list(prompt)  # committed
        self.prompt_len = len(prompt)
        self.sampling = sampling
        self.kv_len = 0
        self.blocks: list[int] = []
        self.pool = pool
        self._sent = 0  # blocks that the group knows
        self.accepted: list[tuple[int, int]] = []  # (proposed, accepted) of each round
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []

    def share(self, other: Sequence, num_committed: int) -> None:
        """Start on the full blocks of the first positions of another sequence."""
        assert self.tokens[:num_committed] == other.tokens[:num_committed]
        self.blocks = self.pool.fork(other.blocks, num_committed)
        self.kv_len = len(self.blocks) * self.pool.block_size

    def plan(
        self, *, chunk: int | None = None, proposal: tuple[int, ...] = (), rows: tuple[Any, ...] = ()
    ) -> SequencePlan:
        """Rows from ``kv_len`` on: ``chunk`` of the committed tokens, or all that is left and the proposal."""
        todo = self.tokens[self.kv_len :]
        last = chunk is None or chunk >= len(todo)
        tokens = tuple(todo if last else todo[:chunk]) + (proposal if last else ())
        k = len(proposal) if last else 0
        extra = self.pool.blocks_for(self.kv_len + len(tokens)) - len(self.blocks)
        self.blocks += self.pool.allocate(max(extra, 0))
        scored: tuple[int, ...] = ()
        if self.sampling.prompt_logprobs is not None:
            scored = tuple(self.tokens[self.kv_len + 1 : min(self.kv_len + len(tokens) + 1 - k, self.prompt_len)])
        is_first = self._sent == 0
        plan = SequencePlan(
            seq_id=self.seq_id,
            generation=self.generation,
            kv_len=self.kv_len,
            tokens=tokens,
            block_keep=self._sent,
            block_append=tuple(self.blocks[self._sent :]),
            num_proposal_tokens=k,
            draft_rows=rows if last else (),
            logits_rows=tuple(range(0 if scored else len(tokens) - k - 1, len(tokens))) if last or scored else (),
            sampling=self.sampling if is_first else None,
            scored_tokens=scored,
            prefix_tokens=tuple(self.tokens[: self.kv_len]) if is_first else (),
        )
        self._sent = len(self.blocks)
        return plan

    def take(self, plan: SequencePlan, result: SequenceResult) -> None:
        """Commit."""
        assert (result.seq_id, result.generation) == (self.seq_id, self.generation)
        assert result.error is None, result.error_message
        own = len(plan.tokens) - plan.num_proposal_tokens
        self.logprobs += result.logprobs
        self.prompt_logprobs += result.prompt_logprobs
        assert len(result.logprobs) == (len(result.committed) if self.sampling.logprobs is not None else 0)
        assert len(result.prompt_logprobs) == len(plan.scored_tokens)
        if plan.verified_rows:
            assert len(result.committed) == result.num_accepted + 1
            assert result.committed[:-1] == plan.tokens[own : own + result.num_accepted]
            self.accepted.append((plan.num_proposal_tokens, result.num_accepted))
        else:
            assert result.committed == ()
        self.tokens += result.committed
        self.kv_len += own + result.num_accepted
        keep = self.pool.blocks_for(self.kv_len)
        self.pool.release(self.blocks[keep:])
        del self.blocks[keep:]
        self._sent = len(self.blocks)

    def release(self) -> None:
        self.pool.release(self.blocks)
        self.blocks = []


class Oracle:
    """The same model in this process, whole: computes every row from scratch."""

    def __init__(self, model: str) -> None:
        self.engine = Engine(TargetConfig(**settings_of(model)), Parallel.single())

    def logits(self, tokens: list[int], count: int) -> torch.Tensor:
        """Logits after each of the last ``count`` tokens [count, vocab_size]."""
        table = list(range(-(-len(tokens) // self.engine.block_size)))
        size = self.engine.max_num_batched_tokens
        parts = []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            rows = [row for row in range(len(part)) if start + row >= len(tokens) - count]
            parts.append(self.engine.forward([SequenceRows(part, start, table, rows)]))
        return self.engine.local_logits(torch.cat(parts))

    def outcome(
        self,
        tokens: list[int],
        proposal: tuple[int, ...],
        rows: tuple[Any, ...],
        sampling: Sampling,
        matcher: Matcher | None = None,
    ) -> Outcome:
        """What a round on top of ``tokens`` has to commit. ``matcher``: of the sampling's grammar, if it has one."""
        allowed = None if matcher is None else matcher.allowed(tokens[sampling.prompt_len :], proposal)
        return verify_one(
            Chain(
                logits=self.logits([*tokens, *proposal], len(proposal) + 1),
                sampling=sampling,
                first_position=len(tokens),
                draft_tokens=proposal,
                draft_rows=[(torch.from_numpy(row.token_ids), torch.from_numpy(row.probs)) for row in rows],
                text=tokens,
                allowed=None if allowed is None else torch.from_numpy(allowed),
            )
        )

    def plain(self, prompt: list[int], sampling: Sampling, count: int, matcher: Matcher | None = None) -> list[int]:
        """Plain decoding, one token after the other."""
        tokens = list(prompt)
        for _ in range(count):
            outcome = self.outcome(tokens, (), (), sampling, matcher)
            assert outcome.error is None, outcome.error
            tokens.append(outcome.next_token)
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def oracle(model_dir: str) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(model_dir)


@pytest.fixture(scope="session")
def oracle_class() -> type[Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def group_class(warm_python: WarmPython) -> Callable[..., Group]:
    return partial(Group, warm_python)


@pytest.fixture(scope="session")
def client_class() -> type[Client]:
    return Client


@pytest.fixture(scope="session")
def steps_class() -> type[Steps]:
    return Steps


@pytest.fixture
def steps(group: Group, client: Client) -> Steps:
    return Steps(client, group.world_size)


@pytest.fixture(scope="session")
def group_failed() -> type[GroupFailed]:
    return GroupFailed


@pytest.fixture(scope="session")
def make_target_model() -> Callable[..., str]:
    return make_model


GroupStarter = Callable[..., Group]


@pytest.fixture
def start_group(model_dir: str, warm_python: WarmPython) -> Iterator[GroupStarter]:
    """start_group(world_size, fault=..., **config): a group of one's own, killed at the end."""
    with contextlib.ExitStack() as stack:

        def start(world_size: int, *, model: str = model_dir, **options: Any) -> Group:
            group = Group(warm_python, model, world_size, **options)
            stack.callback(group.kill)
            return group

        yield start


# One group of one rank, one of two that share memory, one of two that pretend to be on different hosts.
LAYOUTS = {"one": (1, None), "two": (2, None), "two-hosts": (2, 1)}


@pytest.fixture(scope="module", params=LAYOUTS)
def group(request: pytest.FixtureRequest, model_dir: str, warm_python: WarmPython) -> Iterator[Group]:
    """A healthy group that the tests of a module share; attaching clears it."""
    world_size, local_size = LAYOUTS[request.param]
    group = Group(warm_python, model_dir, world_size, local_size=local_size)
    yield group
    group.stop()


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    client = group.attach()
    yield client
    client.close()


@pytest.fixture
def new_sequence() -> Iterator[Callable[..., Sequence]]:
    """new_sequence(prompt, sampling): sequences that share one block pool, which is checked at the end."""
    pool = BlockPool(64, 4)
    made: list[Sequence] = []

    def make(prompt: list[int], sampling: Sampling) -> Sequence:
        made.append(Sequence(len(made) + 1, prompt, sampling, pool))
        return made[-1]

    yield make
    pool.check_integrity(sequence.blocks for sequence in made)

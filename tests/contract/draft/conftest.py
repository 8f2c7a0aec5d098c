"""A draft worker on a real socket with a tiny random model, a scheduler's side of its stream, and a plain decode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from outrider.cluster.config import DraftConfig
from outrider.core.fingerprint import tokenizer_fingerprint
from outrider.core.prefix import hash_tokens
from outrider.core.proposal import Proposal
from outrider.core.sampling import Sampling
from outrider.core.wire import proposal_from_wire, sampling_to_wire
from outrider.kernels.reference.draft import draw
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from outrider.workers.draft.batcher import Batcher
from outrider.workers.draft.worker import DraftWorker
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.parallel import Parallel

VOCAB_SIZE = 300
EMBEDDING_ROWS = 320  # 20 rows of padding
DEADLINE_S = 60.0


def make_model(folder: Path) -> Path:
    """A random Qwen2 with peaked distributions. The padding rows of its head would win every draw if they took part.

    Its widths are multiples of 32: torch's vectorised SiLU takes that many numbers at a time and another path for what
    is left, so that otherwise a row's last bits would depend on the number of rows beside it.
    """
    from tokenizers import Tokenizer, models
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=EMBEDDING_ROWS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.25,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[VOCAB_SIZE:] *= 50.0
    model.save_pretrained(folder)
    vocab = {f"w{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("draft-model"))


def draft_config(model_dir: Path, **changes: Any) -> DraftConfig:
    settings: dict[str, Any] = {
        "model": str(model_dir),
        "device": "cpu",
        "block_size": 8,
        "num_kv_blocks": 2000,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
        "top_m": 16,
    }
    return DraftConfig(**(settings | changes))


@pytest.fixture(scope="session")
def plain_engine(model_dir: Path) -> Engine:
    """The same model by itself, for what a worker should have answered."""
    return Engine(draft_config(model_dir, num_kv_blocks=300), Parallel.single())


@dataclass(frozen=True)
class Plain:
    """What a decode of one session by itself draws, and the logits that it draws from."""

    tokens: tuple[int, ...]
    rows: list[tuple[list[int], list[float]]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="session")
def plain_decode(plain_engine: Engine) -> Callable[..., Plain]:
    def decode(prefix: Sequence[int], count: int, sampling: Sampling, top_m: int = 16) -> Plain:
        text, rows, all_logits = list(prefix), [], []
        start = 0
        while len(text) < len(prefix) + count:
            tokens = text[start : start + 64]
            end = start + len(tokens)
            last = (len(tokens) - 1,) if end == len(text) else ()
            table = range(-(-end // plain_engine.block_size))
            hidden = plain_engine.forward([SequenceRows(tokens, start, table, last)])
            start = end
            if not last:
                continue
            logits = plain_engine.local_logits(hidden)[0]
            token, ids, probs = draw(
                logits,
                len(text),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed,
                choice=sampling.choice,
                verifier=sampling.verifier.label,
                prefix_hash=hash_tokens(text),
                top_m=top_m,
            )
            text.append(token)
            all_logits.append(logits)
            if ids is not None and probs is not None:
                rows.append((ids.tolist(), probs.tolist()))
        return Plain(tuple(text[len(prefix) :]), rows, all_logits)

    return decode


@dataclass
class Running:
    """A started worker. Tests may look into it between two steps."""

    worker: DraftWorker
    facts: dict[str, Any]

    def inspect(self, look: Callable[[Batcher], Any]) -> Any:
        """``look(batcher)``, called in the compute thread between two steps."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def call(batcher: Batcher) -> None:
            try:
                answers.put((look(batcher), None))
            except AssertionError as error:
                answers.put((None, error))

        assert self.worker._compute is not None
        self.worker._compute.inspect(call)
        answer, error = answers.get(timeout=DEADLINE_S)
        if error is not None:
            raise error
        return answer

    async def until(self, condition: Callable[[Batcher], bool]) -> None:
        """Return when a condition holds between two steps; fail after the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.inspect(condition):  # noqa: ASYNC110 - the other side is a thread
                await asyncio.sleep(0.01)

    def check_integrity(self) -> None:
        self.inspect(lambda batcher: batcher.check_integrity())


class Scheduler:
    """The scheduler's end of one stream."""

    def __init__(self, address: str, fingerprint: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.call: Any = draft_pb2_grpc.DraftServiceStub(self.channel).Session()
        self._fingerprint = fingerprint

    async def hello(self, vocab_size: int = VOCAB_SIZE) -> draft_pb2.DraftHello:
        hello = draft_pb2.SchedulerHello(
            scheduler_id="s", group_id="g", tokenizer_fingerprint=self._fingerprint, vocab_size=vocab_size
        )
        await self.send(hello=hello)
        return (await self.receive()).hello

    async def send(self, *, epoch: int = 1, generation: int = 0, **body: Any) -> None:
        header = common_pb2.Header(epoch=epoch, generation=generation)
        async with asyncio.timeout(DEADLINE_S):
            await self.call.write(draft_pb2.SessionRequest(header=header, **body))

    async def receive(self) -> draft_pb2.SessionResponse:
        async with asyncio.timeout(DEADLINE_S):
            message = await self.call.read()
        assert message is not grpc.aio.EOF, "the worker ended the stream"
        return message

    async def open(
        self, session_id: int, tokens: Sequence[int], sampling: Sampling, num_tokens: int = 4, generation: int = 1
    ) -> None:
        await self.send(
            generation=generation,
            open=draft_pb2.Open(
                session_id=session_id,
                tokens=tokens,
                prefix_len=len(tokens),
                prefix_hash=hash_tokens(tokens),
                sampling=sampling_to_wire(sampling),
                num_tokens=num_tokens,
            ),
        )

    async def commit(
        self, session_id: int, text: Sequence[int], base_len: int, num_tokens: int = 4, generation: int = 1
    ) -> None:
        await self.send(
            generation=generation,
            commit=draft_pb2.Commit(
                session_id=session_id,
                base_len=base_len,
                tokens=text[base_len:],
                hash=hash_tokens(text),
                num_tokens=num_tokens,
            ),
        )

    async def proposal(self) -> tuple[int, Proposal]:
        message = await self.receive()
        assert message.WhichOneof("body") == "proposed", message
        return message.proposed.session_id, proposal_from_wire(message.proposed.proposal)

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


@pytest.fixture
def start_worker(model_dir: Path) -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def start(*, redis_url: str | None = None, **changes: Any) -> Running:
            worker = DraftWorker(draft_config(model_dir, **changes), cluster="c", draft_id="d", redis_url=redis_url)
            stack.callback(worker.stop)
            return Running(worker, worker.start())

        yield start


@pytest.fixture
def worker(start_worker: Callable[..., Running]) -> Running:
    return start_worker()


@pytest.fixture
async def connect(model_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    schedulers: list[Scheduler] = []

    async def connect_to(running: Running, *, hello: bool = True, fingerprint: str | None = None) -> Scheduler:
        scheduler = Scheduler(running.facts["address"], fingerprint or tokenizer_fingerprint(model_dir))
        schedulers.append(scheduler)
        if hello:
            await scheduler.hello()
        return scheduler

    yield connect_to
    for scheduler in schedulers:
        await scheduler.close()

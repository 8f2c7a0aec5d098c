"""A draft worker without a model: proposes what a ``ToyModel`` says, right or wrong, in time or late."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from outrider.core.prefix import HashedTokens
from outrider.core.sampling import Sampling
from outrider.core.wire import sampling_from_wire
from outrider.testing.server import StandInServer
from outrider.testing.toy import VOCAB_SIZE, ToyModel
from outrider.testing.verdicts import decide
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc


@dataclass
class _Session:
    text: HashedTokens
    generation: int
    num_tokens: int
    sampling: Sampling


def nan_rows(proposal: common_pb2.Proposal) -> None:
    """A corruption: every row's probabilities are NaN."""
    del proposal.rows[:]
    for token in proposal.tokens:
        proposal.rows.add(token_ids=[token], probs=[math.nan])


def foreign_tokens(proposal: common_pb2.Proposal) -> None:
    """A corruption: tokens outside the vocabulary."""
    proposal.tokens[:] = [VOCAB_SIZE + 7] * len(proposal.tokens)


def wrong_base(proposal: common_pb2.Proposal) -> None:
    """A corruption: continues another text."""
    proposal.base_hash ^= 1


def from_the_future(proposal: common_pb2.Proposal) -> None:
    """A corruption: continues a text that does not exist yet."""
    proposal.base_len += 1000


@dataclass
class StandInDraft(draft_pb2_grpc.DraftServiceServicer, StandInServer):
    """A gRPC server of ``DraftService``; use it as an async context manager.

    Attributes:
        wrong_every: each so-manyth token of the text is proposed wrongly; 0 means never.
        delay_s: time from a commit to its proposal.
        corrupt: changes each proposal before it is sent.
        evict: answer every Open with Evicted.
        refuse: end every stream with FAILED_PRECONDITION and this line, as a worker does whose tokenizer is another.
        faults: what was wrong with messages of the scheduler; empty in a correct run.
        answered: the length of each session's text that it proposed for last, by the session's id, those without room
            for a proposal included.
        resting: sessions that were told to propose nothing; they are told nothing more until they shall propose again.
    """

    model: ToyModel
    fingerprint: str = ""
    draft_id: str = "draft-0"
    wrong_every: int = 0
    delay_s: float = 0.0
    max_model_len: int = 512
    max_num_tokens: int = 8
    corrupt: Callable[[common_pb2.Proposal], None] | None = None
    evict: bool = False
    refuse: str = ""
    faults: list[str] = field(default_factory=list)
    num_streams: int = 0
    num_opened: int = 0
    num_proposed: int = 0
    num_sessions: int = 0
    answered: dict[int, int] = field(default_factory=dict)
    resting: set[int] = field(default_factory=set)

    def is_done(self, session_id: int, length: int) -> bool:
        """Whether it proposed for so long a text of a session, or was told to propose nothing."""
        return session_id in self.resting or self.answered.get(session_id, 0) >= length

    def _register(self, server: Any) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def stop(self) -> None:
        """Die at once: streams break and sessions are gone."""
        await super().stop()
        self.num_sessions = 0
        self.answered.clear()
        self.resting.clear()

    def record(self) -> dict[str, Any]:
        """What it would announce in the registry."""
        return {
            "draft_id": self.draft_id,
            "address": self.address,
            "model": "toy",
            "placement": "any",
            "node": "here",
            "pid": 1,
        }

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[draft_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[draft_pb2.SessionResponse]:
        self.num_streams += 1
        if self.refuse:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse)
        sessions: dict[int, _Session] = {}
        outbox: asyncio.Queue[draft_pb2.SessionResponse] = asyncio.Queue()
        late: set[asyncio.Task[None]] = set()

        async def receive() -> None:
            async for request in requests:
                session_id = self._receive(request, sessions, outbox)
                if session_id is not None:
                    task = asyncio.create_task(self._propose(session_id, sessions, outbox))
                    late.add(task)
                    task.add_done_callback(late.discard)

        receiver = asyncio.create_task(receive())
        try:
            while True:
                yield await outbox.get()
        finally:
            receiver.cancel()
            for task in late:
                task.cancel()

    def _receive(
        self,
        request: draft_pb2.SessionRequest,
        sessions: dict[int, _Session],
        outbox: asyncio.Queue[draft_pb2.SessionResponse],
    ) -> int | None:
        """Take in a message; returns the session that is to propose now."""
        match request.WhichOneof("body"):
            case "hello":
                hello = draft_pb2.DraftHello(
                    draft_id=self.draft_id,
                    model="toy",
                    drafter="model",
                    tokenizer_fingerprint=self.fingerprint,
                    vocab_size=VOCAB_SIZE,
                    max_model_len=self.max_model_len,
                    max_num_tokens=self.max_num_tokens,
                )
                outbox.put_nowait(draft_pb2.SessionResponse(hello=hello))
                return None
            case "open":
                return self._open(request, sessions, outbox)
            case "commit":
                return self._commit(request.commit, sessions)
            case "close":
                if sessions.pop(request.close.session_id, None) is not None:
                    self.num_sessions -= 1
                    self.answered.pop(request.close.session_id, None)
                    self.resting.discard(request.close.session_id)
        return None

    def _open(
        self,
        request: draft_pb2.SessionRequest,
        sessions: dict[int, _Session],
        outbox: asyncio.Queue[draft_pb2.SessionResponse],
    ) -> int | None:
        opened = request.open
        self.num_opened += 1
        if self.evict:
            evicted = draft_pb2.Evicted(session_id=opened.session_id, reason=draft_pb2.EVICTION_REASON_NO_MEMORY)
            outbox.put_nowait(draft_pb2.SessionResponse(header=request.header, evicted=evicted))
            return None
        text = HashedTokens(opened.tokens)
        if text.hashes[-1] != opened.prefix_hash or opened.session_id in sessions:
            self.faults.append(f"open {opened.session_id} with another hash, or twice")
        sessions[opened.session_id] = _Session(
            text=text,
            generation=request.header.generation,
            num_tokens=opened.num_tokens,
            sampling=sampling_from_wire(opened.sampling),
        )
        self.num_sessions += 1
        return opened.session_id

    def _commit(self, commit: draft_pb2.Commit, sessions: dict[int, _Session]) -> int | None:
        session = sessions.get(commit.session_id)
        if session is None:
            return None
        if commit.base_len > len(session.text):
            self.faults.append(f"commit {commit.session_id} at {commit.base_len} of {len(session.text)}")
            return None
        session.text.truncate(commit.base_len)
        session.text.extend(commit.tokens)
        session.num_tokens = commit.num_tokens
        (self.resting.discard if commit.num_tokens else self.resting.add)(commit.session_id)
        if session.text.hashes[-1] != commit.hash:
            self.faults.append(f"commit {commit.session_id}: another text than the scheduler's")
        return commit.session_id

    async def _propose(
        self, session_id: int, sessions: dict[int, _Session], outbox: asyncio.Queue[draft_pb2.SessionResponse]
    ) -> None:
        session = sessions[session_id]
        base, base_hash = len(session.text), session.text.hashes[-1]
        count = min(session.num_tokens, self.max_num_tokens)
        tokens = self._tokens(session, count)
        await asyncio.sleep(self.delay_s)
        if session_id not in sessions:
            return
        self.answered[session_id] = base
        if not tokens:
            return
        self.num_proposed += 1
        proposal = common_pb2.Proposal(
            proposal_id=self.num_proposed, base_len=base, base_hash=base_hash, tokens=tokens, drafter="model"
        )
        if session.sampling.needs_draft_probs:
            for token in tokens:
                proposal.rows.add(token_ids=[token], probs=[1.0])
        if self.corrupt is not None:
            self.corrupt(proposal)
        outbox.put_nowait(
            draft_pb2.SessionResponse(
                header=common_pb2.Header(generation=session.generation),
                proposed=draft_pb2.Proposed(session_id=session_id, proposal=proposal),
            )
        )

    def _tokens(self, session: _Session, count: int) -> list[int]:
        """Those that a target commits under the session's settings; grammars are not looked at."""
        sampling = replace(session.sampling, grammar=None, logprobs=None, prompt_logprobs=None)
        text, tokens = HashedTokens(session.text.tokens), []
        for _ in range(count):
            verdict = decide(self.model, text, (), sampling)
            if verdict.error is not None:
                break
            token = verdict.committed[0]
            if self.wrong_every and len(text) % self.wrong_every == 0:
                token = (token + 1) % VOCAB_SIZE
            text.extend([token])
            tokens.append(token)
        return tokens

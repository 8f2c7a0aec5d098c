"""What schedulers ask of a draft worker and what it answers, as plain data, and its form in ``outrider.v1``."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from outrider.core.errors import InvalidRequest
from outrider.core.proposal import Proposal
from outrider.core.sampling import Sampling, Verifier, sampling_fault
from outrider.core.wire import proposal_to_wire, sampling_from_wire
from outrider.v1 import common_pb2, draft_pb2


@dataclass(frozen=True)
class Address:
    """Names one session at one moment. Session ids are a scheduler's own, so the stream is a part of the name."""

    stream: int
    session_id: int
    epoch: int
    generation: int

    @property
    def key(self) -> tuple[int, int]:
        return self.stream, self.session_id


@dataclass(frozen=True)
class Open:
    """Fields as in ``draft.proto``."""

    address: Address
    tokens: tuple[int, ...]
    prefix_len: int
    prefix_hash: int
    sampling: Sampling
    num_tokens: int
    traceparent: str = ""


@dataclass(frozen=True)
class Commit:
    address: Address
    base_len: int
    tokens: tuple[int, ...]
    hash: int
    num_tokens: int
    proposal_id: int = 0
    num_accepted: int = 0
    traceparent: str = ""


@dataclass(frozen=True)
class Close:
    address: Address


@dataclass(frozen=True)
class Refuse:
    """An Open that cannot be served as it is; the session, if there was one, ends."""

    address: Address
    why: str


@dataclass(frozen=True)
class CloseStream:
    """The scheduler is gone, and all its sessions with it."""

    stream: int


Command = Open | Commit | Close | Refuse | CloseStream


class EvictionReason(enum.IntEnum):
    """The numbers are those of the protocol."""

    UNSPECIFIED = 0  # a message that could not be served; the worker's log says why
    CONTEXT_FULL = 1
    NO_MEMORY = 2
    INVALID_LOGITS = 3
    SHUTDOWN = 4


@dataclass(frozen=True)
class NeedTokens:
    from_len: int


@dataclass(frozen=True)
class Event:
    """An answer to the scheduler of ``address.stream``."""

    address: Address
    body: Proposal | EvictionReason | NeedTokens


def command_from_wire(stream: int, message: draft_pb2.SessionRequest) -> Command:
    """Raises ``InvalidRequest`` for a message that is none of open, commit and close."""
    header = message.header
    body = message.WhichOneof("body")
    if body == "open":
        address = Address(stream, message.open.session_id, header.epoch, header.generation)
        return _open_from_wire(address, message.open)
    if body == "commit":
        commit = message.commit
        return Commit(
            Address(stream, commit.session_id, header.epoch, header.generation),
            base_len=commit.base_len,
            tokens=tuple(commit.tokens),
            hash=commit.hash,
            num_tokens=commit.num_tokens,
            proposal_id=commit.proposal_id,
            num_accepted=commit.num_accepted,
            traceparent=commit.traceparent,
        )
    if body == "close":
        return Close(Address(stream, message.close.session_id, header.epoch, header.generation))
    raise InvalidRequest("body", body, "open, commit or close after the hello")


def event_to_wire(event: Event) -> draft_pb2.SessionResponse:
    header = common_pb2.Header(epoch=event.address.epoch, generation=event.address.generation)
    session_id = event.address.session_id
    if isinstance(event.body, Proposal):
        proposed = draft_pb2.Proposed(session_id=session_id, proposal=proposal_to_wire(event.body))
        return draft_pb2.SessionResponse(header=header, proposed=proposed)
    if isinstance(event.body, NeedTokens):
        need_tokens = draft_pb2.NeedTokens(session_id=session_id, from_len=event.body.from_len)
        return draft_pb2.SessionResponse(header=header, need_tokens=need_tokens)
    reason = int(event.body)
    evicted = draft_pb2.Evicted(session_id=session_id, reason=reason)  # type: ignore[arg-type]
    return draft_pb2.SessionResponse(header=header, evicted=evicted)


def _open_from_wire(address: Address, message: draft_pb2.Open) -> Open | Refuse:
    if message.sampling.verifier not in list(Verifier):
        return Refuse(address, f"sampling.verifier is {message.sampling.verifier}, which this draft does not know")
    try:
        sampling = sampling_from_wire(message.sampling)
    except ValueError as error:
        return Refuse(address, f"sampling is not understood: {error}")
    why = sampling_fault(sampling)
    if why is not None:
        return Refuse(address, why)
    return Open(
        address,
        tokens=tuple(message.tokens),
        prefix_len=message.prefix_len,
        prefix_hash=message.prefix_hash,
        sampling=sampling,
        num_tokens=message.num_tokens,
        traceparent=message.traceparent,
    )

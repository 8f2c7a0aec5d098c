"""Messages of draft.proto and their plain form."""

import numpy as np
import pytest

from outrider.core.errors import InvalidRequest
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.core.wire import sampling_to_wire
from outrider.v1 import common_pb2, draft_pb2
from outrider.workers.draft.messages import (
    Address,
    Close,
    Commit,
    Event,
    EvictionReason,
    NeedTokens,
    Open,
    Refuse,
    command_from_wire,
    event_to_wire,
)

HEADER = common_pb2.Header(epoch=3, generation=8)
ADDRESS = Address(stream=5, session_id=2**63, epoch=3, generation=8)
SAMPLING = Sampling(temperature=0.5, top_k=3, top_p=0.25, seed=2**64 - 1, choice=2, verifier=Verifier.REJECTION)


def test_commands() -> None:
    opened = draft_pb2.Open(
        session_id=2**63,
        tokens=[4, 5],
        prefix_len=2,
        prefix_hash=2**64 - 2,
        sampling=sampling_to_wire(SAMPLING),
        num_tokens=6,
    )
    assert command_from_wire(5, draft_pb2.SessionRequest(header=HEADER, open=opened)) == Open(
        ADDRESS, (4, 5), 2, 2**64 - 2, SAMPLING, 6
    )
    committed = draft_pb2.Commit(
        session_id=2**63, base_len=7, tokens=[1], proposal_id=9, num_accepted=1, hash=2**64 - 3, num_tokens=2
    )
    assert command_from_wire(5, draft_pb2.SessionRequest(header=HEADER, commit=committed)) == Commit(
        ADDRESS, base_len=7, tokens=(1,), hash=2**64 - 3, num_tokens=2, proposal_id=9, num_accepted=1
    )
    closed = draft_pb2.Close(session_id=2**63)
    assert command_from_wire(5, draft_pb2.SessionRequest(header=HEADER, close=closed)) == Close(ADDRESS)


@pytest.mark.parametrize("message", [draft_pb2.SessionRequest(), draft_pb2.SessionRequest(hello={})])
def test_other_messages_are_refused(message: draft_pb2.SessionRequest) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        command_from_wire(1, message)


def test_an_unknown_verifier_is_refused() -> None:
    sampling = common_pb2.Sampling(temperature=1.0, top_p=1.0, verifier=9)  # type: ignore[arg-type]
    message = draft_pb2.SessionRequest(header=HEADER, open=draft_pb2.Open(session_id=2**63, sampling=sampling))
    command = command_from_wire(5, message)
    assert isinstance(command, Refuse)
    assert command.address == ADDRESS
    assert "verifier" in command.why


def test_events() -> None:
    row = SparseRow(np.array([4, 9]), np.array([0.25, 0.75], dtype=np.float32))
    message = event_to_wire(Event(ADDRESS, Proposal(1, 2, 2**64 - 1, (9,), rows=(row,))))
    assert message.header == HEADER
    assert message.proposed.session_id == 2**63
    assert list(message.proposed.proposal.rows[0].probs) == [0.25, 0.75]
    assert event_to_wire(Event(ADDRESS, NeedTokens(4))).need_tokens.from_len == 4
    for reason in EvictionReason:
        evicted = event_to_wire(Event(ADDRESS, reason)).evicted
        name = draft_pb2.EvictionReason.Name(evicted.reason)
        assert name == f"EVICTION_REASON_{reason.name}"

"""The flat array between ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import GroupError
from outrider.core.plan import PlanKind, SequencePlan, StepPlan
from outrider.core.proposal import SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.workers.target.codec import Digest, Message, MessageKind, decode, encode

unsigned = st.integers(0, 2**64 - 1)
number = st.integers(0, 2**32 - 1)
numbers = st.lists(number, max_size=5).map(tuple)
samplings = st.builds(
    Sampling,
    temperature=st.floats(allow_nan=False),
    top_k=number,
    top_p=st.floats(allow_nan=False),
    seed=unsigned,
    choice=number,
    verifier=st.sampled_from(Verifier),
)
sequences = st.builds(
    SequencePlan,
    seq_id=unsigned,
    generation=unsigned,
    kv_len=number,
    tokens=numbers,
    block_keep=number,
    block_append=numbers,
    num_proposal_tokens=number,
    parents=st.lists(st.integers(-1, 9), max_size=4).map(tuple),
    logits_rows=numbers,
    commit_path=numbers,
    sampling=st.none() | samplings,
)
plans = st.builds(
    StepPlan,
    epoch=unsigned,
    step=unsigned,
    sequences=st.lists(sequences, max_size=4).map(tuple),
    released=st.lists(unsigned, max_size=3).map(tuple),
    kind=st.sampled_from(PlanKind),
    draft_layers=numbers,
    feature_layers=numbers,
    after_step=st.none() | unsigned,
    traces=st.lists(st.tuples(unsigned, st.text(max_size=60)), max_size=3).map(tuple),
)
digests = st.builds(Digest, number, st.integers(0, 2**53 - 1), number, number)


@given(plans, digests)
def test_round_trip(plan: StepPlan, digest: Digest) -> None:
    message = Message(MessageKind.PLAN, plan, digest)
    values = encode(message)
    assert values.dtype == np.int64
    assert decode(values) == message


@pytest.mark.parametrize("kind", [MessageKind.RESET, MessageKind.KEEP_ALIVE, MessageKind.STOP])
def test_messages_without_a_plan(kind: MessageKind) -> None:
    assert decode(encode(Message(kind))) == Message(kind)


def test_q_rows_stay_with_the_leader() -> None:
    bare = SequencePlan(seq_id=1, generation=1, kv_len=3, tokens=(5, 6), num_proposal_tokens=1, logits_rows=(0, 1))
    row = SparseRow(np.array([6, 7]), np.array([0.5, 0.5], dtype=np.float32))
    messages = [
        Message(MessageKind.PLAN, StepPlan(1, 1, (sequence,))) for sequence in (bare, replace(bare, draft_rows=(row,)))
    ]
    assert np.array_equal(encode(messages[0]), encode(messages[1]))


@given(plans, st.data())
def test_a_damaged_array_is_noticed_or_differs(plan: StepPlan, data: st.DataObject) -> None:
    values = encode(Message(MessageKind.PLAN, plan))
    cut = values[: data.draw(st.integers(0, len(values) - 1))]
    with pytest.raises(GroupError, match="damaged"):
        decode(cut)
    with pytest.raises(GroupError, match="too many"):
        decode(np.concatenate([values, values[:1]]))

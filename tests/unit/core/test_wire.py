"""Everything that crosses the wire comes back as it was, through real serialised bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import wire
from outrider.core.plan import (
    GroupInfo,
    PlanKind,
    RankReport,
    SequenceError,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    StepTiming,
)
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling, Verifier
from outrider.v1 import common_pb2, target_pb2

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FLOAT = st.floats(0.0, 1e6)


def tuples(elements, most=3):
    return st.lists(elements, max_size=most).map(tuple)


@st.composite
def sparse_rows(draw):
    size = draw(st.integers(0, 4))
    ids = draw(st.lists(U32, min_size=size, max_size=size))
    probs = draw(st.lists(st.floats(0.0, 1.0, width=32), min_size=size, max_size=size))
    return SparseRow(np.array(ids, np.int64), np.array(probs, np.float32))


SAMPLINGS = st.builds(Sampling, FLOAT, U32, st.floats(0.0, 1.0), U64, U32, st.sampled_from(Verifier))
PROPOSALS = st.builds(
    Proposal,
    U64,
    U32,
    U64,
    tuples(U32),
    tuples(st.integers(-1, 5)),
    tuples(sparse_rows()),
    st.sampled_from(["model", "ngram"]),
    FLOAT,
)
PLANS = st.builds(
    StepPlan,
    epoch=U64,
    step=U64,
    sequences=tuples(
        st.builds(
            SequencePlan,
            seq_id=U64,
            generation=U64,
            kv_len=U32,
            tokens=tuples(U32),
            block_keep=U32,
            block_append=tuples(U32),
            num_proposal_tokens=U32,
            parents=tuples(st.integers(-1, 5)),
            draft_rows=tuples(sparse_rows()),
            logits_rows=tuples(U32),
            commit_path=tuples(U32),
            sampling=st.none() | SAMPLINGS,
        )
    ),
    released=tuples(U64),
    kind=st.sampled_from(PlanKind),
    draft_layers=tuples(U32),
    feature_layers=tuples(U32),
    after_step=st.none() | U64,
)
RESULTS = st.builds(
    StepResult,
    epoch=U64,
    step=U64,
    sequences=tuples(
        st.builds(
            SequenceResult,
            seq_id=U64,
            generation=U64,
            num_accepted=U32,
            committed=tuples(U32),
            accepted_path=tuples(U32),
            error=st.none() | st.sampled_from(SequenceError),
            error_message=st.text(max_size=5),
            proposals=tuples(PROPOSALS, most=1),
        )
    ),
    ranks=tuples(st.builds(RankReport, U32, U32, U64)),
    timing=st.builds(StepTiming, FLOAT, FLOAT, FLOAT, FLOAT),
)


def plain(value):
    """Dataclasses with arrays as nested tuples, so that they can be compared."""
    if isinstance(value, SparseRow):
        return (value.token_ids.dtype, value.token_ids.tolist(), value.probs.dtype, value.probs.tolist())
    if hasattr(value, "__dataclass_fields__"):
        return (type(value), *(plain(getattr(value, name)) for name in value.__dataclass_fields__))
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def sent(message):
    return type(message).FromString(message.SerializeToString())


@given(SAMPLINGS)
def test_sampling(sampling: Sampling) -> None:
    assert wire.sampling_from_wire(sent(wire.sampling_to_wire(sampling))) == sampling


@given(PROPOSALS)
@settings(deadline=None)
def test_proposal(proposal: Proposal) -> None:
    assert plain(wire.proposal_from_wire(sent(wire.proposal_to_wire(proposal)))) == plain(proposal)


@given(PLANS)
@settings(max_examples=50, deadline=None)
def test_plan(plan: StepPlan) -> None:
    assert plain(wire.plan_from_wire(plan.epoch, sent(wire.plan_to_wire(plan)))) == plain(plan)


@given(RESULTS)
@settings(max_examples=50, deadline=None)
def test_result(result: StepResult) -> None:
    assert plain(wire.result_from_wire(result.epoch, sent(wire.result_to_wire(result)))) == plain(result)


def test_group_info() -> None:
    info = GroupInfo("g", "m", "f", 100, 64, 10, 4, 32, 2, True, "float32", 8)
    assert wire.group_info_from_wire(sent(wire.group_info_to_wire(info))) == info


def test_enumerations_have_the_protocols_numbers() -> None:
    assert {v.value: f"VERIFIER_{v.name}" for v in Verifier} == {
        number: name for name, number in common_pb2.Verifier.items() if number
    }
    assert {k.value: f"PLAN_KIND_{k.name}" for k in PlanKind} == {
        number: name for name, number in target_pb2.PlanKind.items() if number
    }
    assert {e.value: f"SEQUENCE_ERROR_CODE_{e.name}" for e in SequenceError} == {
        number: name for name, number in target_pb2.SequenceErrorCode.items() if number
    }

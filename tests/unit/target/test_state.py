"""What a rank admits, refuses and forgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.plan import SequencePlan, StepPlan, committed_checksum
from outrider.core.sampling import Sampling, Verifier
from outrider.workers.target.state import Limits, SequenceTable

LIMITS = Limits(
    vocab_size=100, max_model_len=64, num_blocks=16, block_size=4, max_num_batched_tokens=20, max_num_seqs=3
)
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)


def sequence(seq_id: int = 1, **changes: object) -> SequencePlan:
    """A first plan: five prompt tokens, the last of which wants logits."""
    fields: dict[str, object] = {
        "seq_id": seq_id,
        "generation": 1,
        "kv_len": 0,
        "tokens": (1, 2, 3, 4, 5),
        "block_append": (2 * seq_id, 2 * seq_id + 1),
        "logits_rows": (4,),
        "sampling": GREEDY,
    }
    return SequencePlan(**{**fields, **changes})  # type: ignore[arg-type]


def decode(seq_id: int = 1, **changes: object) -> SequencePlan:
    """What follows ``sequence``: one token and a proposal of two."""
    fields: dict[str, object] = {
        "kv_len": 5,
        "tokens": (6, 7, 8),
        "num_proposal_tokens": 2,
        "logits_rows": (0, 1, 2),
        "block_keep": 2,
        "block_append": (),
        "sampling": None,
    }
    return sequence(seq_id, **{**fields, **changes})


def plan(*sequences: SequencePlan, released: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(epoch=1, step=1, sequences=sequences, released=released)


@pytest.fixture
def table() -> SequenceTable:
    table = SequenceTable(LIMITS)
    admitted, refused = table.apply(plan(sequence(1), sequence(2)))
    assert len(admitted) == 2
    assert not refused
    return table


def test_a_round_moves_the_committed_length(table: SequenceTable) -> None:
    admitted, refused = table.apply(plan(decode(1)))
    assert not refused
    assert admitted[0].block_table == (2, 3)
    assert admitted[0].sampling == GREEDY
    assert (table.sequences[1].kv_len, table.sequences[1].held) == (5, 8)
    # One of two proposals was accepted: 5 + 1 + 1.
    admitted, refused = table.apply(plan(decode(1, kv_len=7, tokens=(9,), num_proposal_tokens=0, logits_rows=(0,))))
    assert not refused
    assert (table.sequences[1].kv_len, table.sequences[1].held) == (7, 8)


def test_released_sequences_are_forgotten_first(table: SequenceTable) -> None:
    admitted, refused = table.apply(plan(sequence(3, block_append=(2, 3)), released=(1, 77)))
    assert not refused
    assert [item.plan.seq_id for item in admitted] == [3]
    assert set(table.sequences) == {2, 3}


def test_checksum_covers_the_plans_sequences(table: SequenceTable) -> None:
    table.apply(plan(decode(1)))
    assert table.checksum([1, 2, 99]) == committed_checksum([(1, 5), (2, 0)])
    table.clear()
    assert len(table) == 0
    assert table.checksum([1, 2]) == 0


INVALID = {
    "unknown": (decode(9), "first plan must carry sampling"),
    "older generation": (decode(1, generation=0), "older than the current one"),
    "new generation without sampling": (decode(1, generation=2), "must carry sampling"),
    "kv_len beyond": (decode(1, kv_len=6), "only 5 positions are held"),
    "kv_len never computed": (
        sequence(3, kv_len=4, tokens=(1,), logits_rows=(0,)),
        "0 computed positions where 4 are needed",
    ),
    "block_keep": (decode(1, block_keep=3), "the block table has 2"),
    "block that is not there": (decode(1, block_append=(16,)), "block 16 does not exist"),
    "block twice": (decode(1, block_append=(2,)), "twice in the block table"),
    "blocks too few": (decode(1, block_keep=1), "1 blocks of 4 positions do not hold 8"),
    "no rows": (decode(1, tokens=(), num_proposal_tokens=0, logits_rows=()), "no tokens"),
    "too many rows": (sequence(3, tokens=(1,) * 21, logits_rows=(20,)), "at most 20"),
    "beyond the context": (decode(1, kv_len=62), "beyond max_model_len 64"),
    "token outside": (decode(1, tokens=(6, 7, 100)), "token 100 lies outside"),
    "nothing but proposal": (decode(1, num_proposal_tokens=3, logits_rows=(0, 1, 2)), "leave none"),
    "row that is not there": (decode(1, logits_rows=(0, 1, 3)), "logits row 3 does not exist"),
    "proposal without rows": (decode(1, logits_rows=()), "verified with rows 0 to 2"),
    "proposal with too few rows": (decode(1, logits_rows=(1, 2)), "verified with rows 0 to 2"),
    "tree": (decode(1, parents=(-1, -1)), "chains only"),
    "commit path": (decode(1, commit_path=(0,)), "chains only"),
    "temperature": (sequence(3, sampling=Sampling(temperature=-1.0)), "temperature is -1.0"),
    "temperature not finite": (sequence(3, sampling=Sampling(temperature=float("nan"))), "temperature is nan"),
    "top_p": (sequence(3, sampling=Sampling(top_p=0.0)), "top_p is 0.0"),
    "greedy that samples": (
        sequence(3, sampling=Sampling(verifier=Verifier.GREEDY)),
        "verifier is greedy at",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_sequence_is_refused_alone(table: SequenceTable, case: str) -> None:
    wrong, reason = INVALID[case]
    before = dict(table.sequences)
    admitted, refused = table.apply(plan(wrong, decode(2)))
    assert [(item.index, item.plan) for item in refused] == [(0, wrong)]
    assert reason in refused[0].message
    assert [item.plan.seq_id for item in admitted] == [2]
    assert {key: state for key, state in table.sequences.items() if key != 2} == {
        key: state for key, state in before.items() if key != 2
    }


def test_a_chain_may_name_its_parents(table: SequenceTable) -> None:
    _, refused = table.apply(plan(decode(1, parents=(-1, 0))))
    assert not refused


def test_a_sequence_twice_is_refused_once(table: SequenceTable) -> None:
    admitted, refused = table.apply(plan(decode(1), decode(1)))
    assert len(admitted) == 1
    assert "twice" in refused[0].message


def test_rows_count_over_the_whole_plan(table: SequenceTable) -> None:
    long = sequence(3, tokens=(1,) * 16, logits_rows=(), block_append=(8, 9, 10, 11))
    admitted, refused = table.apply(plan(long, decode(1), decode(2)))
    assert [item.plan.seq_id for item in admitted] == [3, 1]
    assert "of which 1 are left" in refused[0].message


def test_sequences_count_over_the_whole_plan(table: SequenceTable) -> None:
    chunks = [sequence(3 + i, tokens=(1,), logits_rows=(), block_append=(8 + i,)) for i in range(2)]
    admitted, refused = table.apply(plan(*chunks, decode(1), decode(2)))
    assert [item.plan.seq_id for item in admitted] == [3, 4, 1]
    assert "more than 3 sequences" in refused[0].message


def test_two_sequences_cannot_write_one_block(table: SequenceTable) -> None:
    admitted, refused = table.apply(plan(decode(1), sequence(3, block_append=(3, 8))))
    assert [item.plan.seq_id for item in admitted] == [1]
    assert "block 3 is written by sequence 1" in refused[0].message


def test_full_blocks_may_be_shared(table: SequenceTable) -> None:
    """A fork starts behind blocks that another sequence computed, but not behind more than that."""
    fork = sequence(3, kv_len=4, tokens=(9,), logits_rows=(0,), block_append=(2, 9))
    assert not table.apply(plan(fork))[1]
    far = sequence(4, kv_len=8, tokens=(9,), logits_rows=(0,), block_append=(2, 3, 10))
    assert "block 3 of the table holds 1 computed positions where 4" in table.apply(plan(far))[1][0].message


def test_a_preempted_sequence_starts_over(table: SequenceTable) -> None:
    table.apply(plan(decode(1)))
    again = sequence(1, tokens=(1, 2, 3, 4, 5, 6), logits_rows=(5,), block_append=(8, 9))
    assert not table.apply(plan(again))[1]
    assert table.sequences[1].block_table == [8, 9]
    assert table.sequences[1].held == 6


@given(st.data())
def test_every_rank_decides_alike(data: st.DataObject) -> None:
    """Two tables that see the same plans, good and bad, hold the same after each."""
    ranks = [SequenceTable(LIMITS), SequenceTable(LIMITS)]
    small = st.integers(0, 9)
    for _ in range(data.draw(st.integers(1, 6))):
        sequences = data.draw(
            st.lists(
                st.builds(
                    SequencePlan,
                    seq_id=st.integers(1, 3),
                    generation=st.integers(0, 2),
                    kv_len=small,
                    tokens=st.lists(st.integers(0, 101), max_size=6).map(tuple),
                    block_keep=st.integers(0, 3),
                    block_append=st.lists(st.integers(0, 16), max_size=3).map(tuple),
                    num_proposal_tokens=st.integers(0, 2),
                    logits_rows=st.lists(st.integers(0, 6), max_size=2).map(tuple),
                    sampling=st.sampled_from([None, GREEDY]),
                ),
                max_size=4,
            )
        )
        step = plan(*sequences, released=tuple(data.draw(st.lists(st.integers(1, 3), max_size=2))))
        first, second = (rank.apply(step) for rank in ranks)
        assert first == second
        assert len(first[0]) + len(first[1]) == len(sequences)
        assert ranks[0].sequences == ranks[1].sequences
        for item in first[0]:
            assert len(item.block_table) * LIMITS.block_size >= item.plan.kv_len + len(item.plan.tokens)


PENALTY = Sampling(temperature=0.0, verifier=Verifier.GREEDY, controls=(("repetition_penalty", 1.3),), prompt_len=5)


def test_tokens_are_kept_where_the_sampling_looks_at_them(table: SequenceTable) -> None:
    """S3: a rejected token leaves the memory with its keys and values."""
    admitted, _ = table.apply(plan(sequence(3, sampling=PENALTY), sequence(1, sampling=GREEDY)))
    assert [list(item.text) for item in admitted] == [[1, 2, 3, 4, 5], []]
    admitted, _ = table.apply(plan(decode(3)))
    assert list(admitted[0].text) == [1, 2, 3, 4, 5, 6, 7, 8]
    one_accepted = decode(3, kv_len=7, tokens=(9,), num_proposal_tokens=0, logits_rows=(0,))
    admitted, _ = table.apply(plan(one_accepted))
    assert list(admitted[0].text) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert table.sequences[1].tokens is None


def test_a_sequence_on_cached_blocks_brings_its_tokens(table: SequenceTable) -> None:
    fork = sequence(3, kv_len=4, tokens=(5,), block_append=(2, 7), logits_rows=(0,), sampling=PENALTY)
    cases = {
        (): "prefix_tokens must name them",
        (1, 2, 3): "kv_len is 4, but 3 prefix_tokens came",
        (1, 2, 3, 100): "token 100 lies outside the vocabulary of 100",
    }
    for tokens, reason in cases.items():
        _, refused = table.apply(plan(replace(fork, prefix_tokens=tokens)))
        assert reason in refused[0].message
        assert 3 not in table.sequences
    admitted, refused = table.apply(plan(replace(fork, prefix_tokens=(1, 2, 3, 4))))
    assert not refused
    assert list(admitted[0].text) == [1, 2, 3, 4, 5]


def test_controls_are_checked_as_they_come(table: SequenceTable) -> None:
    for controls, reason in (
        ((("min_p", 3.0),), "from 0 to 1"),
        ((("logit_bias", ((100, 1.0),)),), "a token id from 0 to 99"),
        ((("unheard_of", 1),), "not known here"),
    ):
        _, refused = table.apply(plan(sequence(3, sampling=replace(PENALTY, controls=controls))))
        assert reason in refused[0].message


def test_tokens_are_scored_only_where_that_was_asked_for(table: SequenceTable) -> None:
    scored = sequence(3, logits_rows=(0, 1, 2, 3, 4), scored_tokens=(2, 3, 4, 5), sampling=GREEDY)
    _, refused = table.apply(plan(scored))
    assert "sampling.prompt_logprobs is not" in refused[0].message
    admitted, _ = table.apply(plan(replace(scored, sampling=replace(GREEDY, prompt_logprobs=0))))
    assert len(admitted) == 1

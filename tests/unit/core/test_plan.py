from __future__ import annotations

import random

from outrider.core.errors import InvalidRequest, OutriderError
from outrider.core.plan import SequencePlan, StepPlan, committed_checksum


def test_the_checksum_is_exact_in_a_float_and_ignores_order() -> None:
    lengths = [(seq_id, seq_id * 7 % 50) for seq_id in range(200)]
    shuffled = random.Random(1).sample(lengths, len(lengths))
    checksum = committed_checksum(lengths)
    assert checksum == committed_checksum(shuffled)
    assert int(float(checksum)) == checksum
    assert committed_checksum([]) == 0


def test_the_checksum_sees_one_length_that_differs() -> None:
    assert committed_checksum([(1, 5), (2, 6)]) != committed_checksum([(1, 5), (2, 7)])
    assert committed_checksum([(1, 5), (2, 6)]) != committed_checksum([(1, 6), (2, 5)])


def test_num_rows_counts_every_token() -> None:
    sequences = (SequencePlan(1, 1, 0, (1, 2, 3)), SequencePlan(2, 1, 4, (5,)))
    assert StepPlan(1, 1, sequences).num_rows == 4


def test_a_wrong_field_is_named_in_one_line() -> None:
    error = InvalidRequest("sampling.top_p", 1.5, "in (0, 1]")
    assert isinstance(error, OutriderError)
    assert (error.field, error.value, error.limit) == ("sampling.top_p", 1.5, "in (0, 1]")
    assert str(error) == "sampling.top_p is 1.5, but must be in (0, 1]"

"""Each control's ``apply`` against its ``reference``, without anything around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.controls import RowText, by_name
from outrider.controls.typical_p import _FIRST_RANKED
from outrider_testbed.controls import assert_apply_is_reference

VALUES: list[tuple[str, list[Any]]] = [
    ("logit_bias", [((1, 2.5), (20, -3.5)), ((0, 100.0),)]),
    ("repetition_penalty", [1.3, 0.7]),
    ("presence_penalty", [0.7, -2.0]),
    ("frequency_penalty", [0.3, -0.1]),
    ("bad_words", [((3,), (4, 5)), ((0, 1, 2),)]),
    ("allowed_token_ids", [(3, 4, 20), tuple(range(23))]),
    ("banned_token_ids", [(3, 4, 20), (0,)]),
    ("min_tokens", [(3, (0, 5)), (6, tuple(range(24)))]),
    ("min_p", [0.1, 0.5, 1.0]),
    ("typical_p", [0.317, 0.873, 0.0001]),
]


@pytest.mark.parametrize(("name", "values"), VALUES, ids=[name for name, _ in VALUES])
@pytest.mark.parametrize("seed", range(5))
def test_apply_is_reference(name: str, values: list[Any], seed: int) -> None:
    control = by_name(name)
    assert control is not None
    assert_apply_is_reference(control, values, seed=seed)


def test_typical_p_ranks_all_tokens_where_the_first_do_not_reach_the_mass() -> None:
    control = by_name("typical_p")
    assert control is not None
    num_tokens = 4 * _FIRST_RANKED
    # Rows 0 and 2 are flat: half of their mass needs more tokens than are ranked at first.
    scores = torch.randn(3, num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores[1] *= 9
    applied = scores.clone()
    control.apply(applied, None, [0.5, 0.5, 0.9], [])
    kept = torch.isfinite(applied).sum(dim=-1)
    assert kept[0] > _FIRST_RANKED
    assert kept[1] < _FIRST_RANKED
    for row, value in enumerate([0.5, 0.5, 0.9]):
        expected = control.reference(scores[row], value, RowText((), 0, 0))
        assert torch.equal(torch.isfinite(applied[row]), torch.isfinite(expected))

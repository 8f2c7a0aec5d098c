"""``outrider profile --curves``: each list along the least of the others, nothing measured twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.plots import draw_costs
from outrider.cluster.commands.curves import curves, joined
from outrider.cluster.commands.profile import as_facts, as_table
from outrider.v1 import admin_pb2


def points(requests: list[admin_pb2.ProfileRequest]) -> list[tuple[int, int, int]]:
    """Sequences, context and rows of what is measured."""
    return [
        (count, context, rows)
        for request in requests
        for count in request.num_sequences
        for context in request.contexts
        for rows in request.rows
    ]


def result(request: admin_pb2.ProfileRequest) -> admin_pb2.ProfileResult:
    """As a router measures it: a pass takes a millisecond for each row."""
    passes = [
        admin_pb2.PassCost(
            context=context,
            num_sequences=count,
            rows=rows,
            forward_ms=admin_pb2.Spread(p50=count * rows, min=1, max=100),
        )
        for count, context, rows in points([request])
    ]
    return admin_pb2.ProfileResult(model="m", passes=passes, left_out=[f"{len(passes)} others"])


def test_each_list_runs_along_the_least_of_the_others() -> None:
    whole = admin_pb2.ProfileRequest(rows=[1, 3, 5], contexts=[64, 32], num_sequences=[2, 4], num_runs=7)
    whole.num_proposals = 9
    made = curves(whole)
    assert points(made) == [(2, 32, 1), (2, 32, 3), (2, 32, 5), (2, 64, 1), (2, 64, 5), (4, 32, 1), (4, 32, 5)]
    assert [(request.num_runs, request.num_proposals) for request in made] == [(7, 9), (7, 0), (7, 0)]
    assert all(request.HasField("num_proposals") for request in made)


def test_defaults_reach_from_one_to_32_sequences_128_to_4000_positions_and_k_to_16() -> None:
    found = points(curves(admin_pb2.ProfileRequest(num_runs=5, num_proposals=40)))
    assert len(found) == len(set(found)) < 30
    assert {count for count, _, _ in found} >= {1, 32}
    assert {context for _, context, _ in found} >= {128, 4000}
    assert {rows for _, _, rows in found} >= {1, 17}


def test_one_value_of_each_is_one_profile() -> None:
    assert len(curves(admin_pb2.ProfileRequest(rows=[2], contexts=[8], num_sequences=[1]))) == 1


def test_the_curves_are_shown_as_one_profile(tmp_path: Path) -> None:
    whole = joined([result(each) for each in curves(admin_pb2.ProfileRequest(num_runs=5))])
    facts = as_facts(whole)
    assert facts["target_ms"] == {str(rows): float(rows) for rows in (1, 2, 3, 5, 9, 13, 17)}
    assert facts["target_ms_by_context"]["4000"] == {"1": 1.0, "5": 5.0}
    assert len(facts["left_out"]) == 3
    table = as_table(facts)
    assert "forward pass, 32 sequence(s)" in table
    pytest.importorskip("matplotlib")
    assert [path.stem for path in draw_costs(facts, tmp_path)] == [
        "pass-by-rows",
        "pass-by-rows-of-one",
        "pass-by-context",
        "pass-by-sequences",
    ]

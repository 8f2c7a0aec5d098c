"""The arithmetic of the measuring scripts: whose gaps count, which texts differ, how many requests fill a cache."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.bench.measures.compare import Difference, first_difference, prompts_of, verdict
from outrider.bench.measures.gaps import Stream, Window, p99_ratio, split
from outrider.bench.measures.oversubscribed import is_sound, requests_needed
from outrider.bench.measures.texts import Texts
from outrider.bench.records import Arrival
from outrider.client import ConfigError


def stream(begun: float, *arrivals: tuple[float, int]) -> Stream:
    return Stream(begun, [Arrival(at, tokens) for at, tokens in arrivals])


def test_gaps_belong_to_the_window_that_they_overlap() -> None:
    steady = stream(0.0, (1.0, 1), (2.0, 1), (4.0, 2), (5.0, 1), (6.0, 1))
    quiet, (first, second) = split([steady], [Window(2.5, 3.5), Window(5.0, 5.5)])
    assert quiet.message == [1.0, 1.0]  # up to 2, and from 4 to 5: that one only touches the second window
    assert first.message == [2.0]
    assert first.token == [1.0, 1.0]  # once for each token that ended it
    assert second.message == [1.0]


def test_a_stall_over_the_whole_window_is_seen() -> None:
    quiet, (within,) = split([stream(0.0, (1.0, 1), (9.0, 1))], [Window(2.0, 8.0)])
    assert (quiet.message, within.message) == ([], [8.0])


def test_gaps_in_which_another_stream_enters_count_nowhere() -> None:
    steady = stream(0.0, (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1))
    late = stream(2.2, (2.8, 1), (3.5, 1))
    unborn = stream(3.9)
    quiet, (within,) = split([steady, late, unborn], [Window(2.0, 3.2)])
    assert quiet.message == [1.0]  # from 1 to 2
    assert within.message == [pytest.approx(0.7)]


def test_the_ratio_of_tails_needs_both_sides() -> None:
    assert p99_ratio([1.0] * 50, [2.0] * 50) == 2.0
    assert p99_ratio([], [2.0]) is None
    assert p99_ratio([1.0], []) is None
    assert p99_ratio([0.0], [1.0]) is None


def test_the_first_difference_is_told_and_so_is_an_early_end() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 4]) == Difference(1, 2, 5)
    assert first_difference([1, 2], [1, 2, 9]) == Difference(2, None, 9)
    assert first_difference([1], []) == Difference(0, 1, None)


def way(proposed: int = 0, accepted: int = 0, differences: int = 0, tokens: int = 10) -> dict[str, Any]:
    return {"proposed": proposed, "accepted": accepted, "differences": [{}] * differences, "tokens": tokens}


def test_equal_texts_prove_something_only_where_proposals_were_accepted_and_refused() -> None:
    assert verdict({"plain-alone": way(), "plain-among": way()}) == "passed"
    assert verdict({"plain-alone": way(), "speculative-alone": way(8, 5)}) == "passed"
    assert verdict({"plain-alone": way(), "speculative-alone": way(0, 0)}) == "unknown"
    assert verdict({"plain-alone": way(), "speculative-alone": way(8, 8)}) == "unknown"
    assert verdict({"plain-alone": way(tokens=0), "plain-among": way(tokens=0)}) == "unknown"
    assert verdict({"plain-alone": way(), "speculative-alone": way(0, 0, differences=1)}) == "failed"


def test_prompts_are_all_different_beyond_the_end_of_the_workload() -> None:
    few, many = prompts_of("chat", 3), prompts_of("chat", 200)
    assert many[:3] == few
    assert len(set(many)) == 200


def test_so_many_requests_that_they_need_the_factor_of_the_blocks() -> None:
    assert requests_needed(num_blocks=48, block_size=16, positions=192, factor=4.0) == 16
    assert requests_needed(num_blocks=48, block_size=16, positions=193, factor=4.0) == 15  # 13 blocks each: 195
    with pytest.raises(ConfigError, match="takes 49 blocks"):
        requests_needed(num_blocks=48, block_size=16, positions=769, factor=4.0)
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        requests_needed(num_blocks=4800, block_size=16, positions=160, factor=4.0)


def test_only_whole_and_equal_texts_are_sound() -> None:
    good = {"lost": [], "ended_early": 0, "equal_texts": 3, "requests": 3}
    assert is_sound(good)
    for bad in ({"lost": ["x"]}, {"ended_early": 1}, {"equal_texts": 2}):
        assert not is_sound({**good, **bad})


def test_texts_are_as_long_as_wanted_and_begin_differently() -> None:
    texts = Texts(pool="words of a pool ", characters_per_token=4.0, seed=1)
    one, other = texts.text(1000, "a"), texts.text(1000, "b")
    assert one == texts.text(1000, "a")
    assert one[:10] != other[:10]
    assert one != Texts(texts.pool, 4.0, seed=2).text(1000, "a")
    assert all(abs(len(text) - 4000) < 8 for text in (one, other))
    assert texts.text(1, "a").endswith("\n")

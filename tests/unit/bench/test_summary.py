"""What records say: gaps, figures, pairs, turns and pictures, on made-up requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.bench.items import Item, Workload
from outrider.bench.records import Arrival, Record
from outrider.bench.run import Arm, BenchRun, BenchSettings, Block, dealt, turns
from outrider.bench.summary import arm_figures, request_pairs, speculation_figures, summarise
from outrider.bench.table import show
from outrider.bench.watch import CacheUse, Energy
from outrider.client import ConfigError, Speculation

SPECULATION = Speculation("greedy", "model", 4, 16, 8, (1, 0, 2, 0, 1), 6, 0)


def record(arm: str = "plain", index: int = 0, begun: float = 10.0, **changes: Any) -> Record:
    """Sent at 10: one token at 10.5, four at 11.3, one at 11.5; the end at 11.5."""
    arrivals = (Arrival(10.5, 1), Arrival(11.3, 4), Arrival(11.5, 1))
    values = {"due": 10.0, "ended": 11.5, "arrivals": arrivals, "prompt_tokens": 7, **changes}
    return Record("w", "item", index, arm, 0, begun=begun, **values)


def block(arm: str, number: int, wall_s: float, tokens: int, joules: float | None = None) -> Block:
    return Block("w", arm, number, 0.0, wall_s, tokens, joules, CacheUse([0.25, 0.5], [1], [0]))


def made_run(**changes: Any) -> BenchRun:
    records = [record("plain", index) for index in range(3)]
    records += [record("speculative", index, ended=11.0, speculation=SPECULATION) for index in range(3)]
    values: dict[str, Any] = {
        "settings": BenchSettings((Workload("w", (Item("item", "p"),), "made"),), requests=3),
        "arms": ("plain", "speculative"),
        "records": tuple(records),
        "blocks": (block("plain", 0, 4.0, 18), block("speculative", 0, 2.0, 18)),
        "origin": 10.0,
        "complete": True,
        "status": {"groups": [{"model": "toy", "dtype": "float32"}]},
    }
    return BenchRun(**{**values, **changes})


def test_gaps_are_told_both_ways() -> None:
    seen = record()
    assert seen.tokens == 6
    assert seen.ttft_s == pytest.approx(0.5)
    assert seen.message_gaps_s == pytest.approx([0.8, 0.2])
    assert seen.token_gaps_s == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.2])
    assert seen.decode_rate == pytest.approx(5 / 1.0)
    assert record(arrivals=()).ttft_s is None
    assert record(arrivals=(Arrival(11.0, 1),)).decode_rate is None


def test_a_client_that_falls_behind_hides_nothing() -> None:
    late = record(begun=10.4)
    assert late.ttft_s == pytest.approx(0.5)  # since it was due
    figures = arm_figures([late], [block("plain", 0, 2.0, 6)])
    assert figures["late_ms"]["p50"] == pytest.approx(400)


def test_failures_are_counted_and_leave_the_figures_alone() -> None:
    records = [record(index=0), record(index=1, error="Unavailable: gone"), record(index=2, error="no", refused=True)]
    figures = arm_figures(records, [block("plain", 0, 2.0, 6, 9.0)])
    assert (figures["requests"], figures["failed"], figures["refused"]) == (3, 1, 1)
    assert figures["errors"] == ["Unavailable: gone", "no"]
    assert figures["completion_tokens"] == 6
    assert figures["total_tokens_per_s"] == 3.0
    assert figures["request_tokens_per_s"]["p50"] == 4.0
    assert figures["joules_per_token"] == 1.5
    assert figures["kv_occupancy"] == {"mean": 0.375, "max": 0.5}


def test_what_speculation_did_is_added_up() -> None:
    figures = speculation_figures([record(speculation=SPECULATION), record(speculation=SPECULATION), record()])
    assert figures is not None
    assert figures["accepted_length"] == 2.0
    assert figures["tokens_per_speculative_step"] == 3.0
    assert figures["acceptance_rate"] == 0.5
    assert figures["accepted_length_histogram"] == [2, 0, 4, 0, 2]
    assert figures["draft_tokens_per_token"] == round(32 / 12, 4)
    assert figures["target_calls_per_token"] == 1.0
    assert speculation_figures([record()]) is None


def test_pairs_are_requests_that_went_well_in_both_arms() -> None:
    base = [record(index=0), record(index=1, error="x"), record(index=2)]
    other = [record("speculative", 0), record("speculative", 1), record("speculative", 2, arrivals=())]
    assert len(request_pairs(base, other)) == 1


def test_a_summary_compares_with_plain_decoding() -> None:
    summary = summarise(made_run())
    ratios = summary["workloads"]["w"]["over_plain"]["speculative"]
    assert ratios["speed"]["ratio"] == pytest.approx(1.5)
    assert ratios["speed"]["interval_95"] == pytest.approx([1.5, 1.5])
    assert ratios["throughput"] == {"ratio": 2.0, "interval_95": None, "pairs": 1}
    assert set(summary["workloads"]["w"]["arms"]) == {"plain", "speculative"}


def test_the_table_shows_every_arm() -> None:
    console = Console(width=220, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        show(summarise(made_run()), console)
    text = captured.get()
    for part in ("plain", "speculative", "1.50", "800.0", "toy float32"):
        assert part in text


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from outrider.bench.plots import PICTURES, draw

    run = made_run()
    written = draw(run, summarise(run), tmp_path / "plots")
    assert [path.stem for path in written] == list(PICTURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_pictures_of_costs_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from outrider.bench.plots import draw_costs

    passes = [
        {"num_sequences": count, "context": context, "rows": rows, "forward_ms": {"p50": 1.0 + rows}}
        for count in (1, 4)
        for context in (128, 512)
        for rows in (5, 1)
    ]
    written = draw_costs({"passes": passes}, tmp_path)
    by_rows = ["pass-by-rows", "pass-by-rows-of-one"]
    assert [path.stem for path in written] == [*by_rows, "pass-by-context", "pass-by-sequences"]
    assert [path.stem for path in draw_costs({"passes": passes[:2]}, tmp_path)] == by_rows
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write plots"):
        draw_costs({"passes": []}, tmp_path / "file")


def test_items_are_dealt_once_each_and_arms_take_turns() -> None:
    items = [Item(str(index), "p") for index in range(10)]
    blocks = dealt(items, 4)
    assert [number for part in blocks for number, _ in part] == list(range(10))
    assert {len(part) for part in blocks} == {2, 3}
    assert len(dealt(items[:2], 4)) == 2
    arms = [Arm(name, None) for name in "abc"]  # type: ignore[arg-type]
    assert ["".join(arm.name for arm in turns(arms, number)) for number in range(4)] == ["abc", "bca", "cab", "abc"]


def test_energy_is_read_where_it_can_be(tmp_path: Path) -> None:
    assert Energy.find(tmp_path) is None
    for number, name in enumerate(("package-0", "core", "package-1")):
        zone = tmp_path / f"intel-rapl:{number}"
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text("5000000\n")
        (zone / "max_energy_range_uj").write_text("9000000\n")
    energy = Energy.find(tmp_path)
    assert energy is not None
    before = energy.read()
    assert before == (5_000_000, 5_000_000)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("7500000\n")
    (tmp_path / "intel-rapl:2" / "energy_uj").write_text("1000000\n")  # it began anew
    assert energy.joules(before, energy.read()) == pytest.approx(2.5 + 5.0)

"""Short loads against stand-ins: closed and open, both arms in turns, the command's answers and its refusals."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.items import Item, Workload
from outrider.bench.run import BenchRun, BenchSettings, run
from outrider.bench.summary import summarise
from outrider.client import GenerationFailed, Unavailable

WORKLOADS = (
    Workload("short", tuple(Item(f"s{n}", f"Once upon {n}", max_tokens=12) for n in range(4)), "made"),
    Workload("talk", (Item("t", messages=({"role": "user", "content": "hello"},), max_tokens=6),), "made"),
)


async def bench(address: str, **changes: Any) -> tuple[BenchRun, list[tuple[str, int, int]]]:
    told: list[tuple[str, int, int]] = []
    values: dict[str, Any] = {"requests": 4, "blocks": 2, "options": {"temperature": 0.0, "ignore_eos": True}}
    settings = BenchSettings(WORKLOADS, deadline_s=30.0, **{**values, **changes})
    seen = await run(address, settings, lambda *words: told.append(words))
    return seen, told


async def test_a_closed_loop_measures_both_arms_on_the_same_requests(stand_ins: Any) -> None:
    seen, told = await bench(stand_ins.address, concurrency=2)
    assert seen.complete
    assert told[-1][1:] == (16, 16)
    assert [(block.workload, block.number, block.arm) for block in seen.blocks] == [
        (workload, number, arm)
        for workload in ("short", "talk")
        for number, arm in ((0, "plain"), (0, "speculative"), (1, "speculative"), (1, "plain"))
    ]
    figures = summarise(seen)["workloads"]["short"]
    plain, speculative = figures["arms"]["plain"], figures["arms"]["speculative"]
    assert plain["completion_tokens"] == speculative["completion_tokens"] == 4 * 12
    assert plain["speculation"]["target_calls_per_token"] == 1.0
    assert plain["speculation"]["draft_tokens_per_token"] == 0.0
    assert plain["failed"] == speculative["failed"] == 0
    assert figures["over_plain"]["speculative"]["speed"]["pairs"] == 4
    assert figures["over_plain"]["speculative"]["speed"]["interval_95"] is not None
    texts = [(record.index, record.arm, record.tokens) for record in seen.records if record.workload == "short"]
    assert len(set(texts)) == 8
    stand_ins.check()


async def test_an_open_loop_keeps_its_schedule_while_requests_run(stand_ins: Any) -> None:
    stand_ins.target.step_s = 0.01
    seen, _ = await bench(stand_ins.address, rate=50.0, requests=6, blocks=1, seed=2)
    for workload in ("short", "talk"):
        due = {
            arm: sorted(r.due for r in seen.records if (r.workload, r.arm) == (workload, arm))
            for arm in ("plain", "speculative")
        }
        gaps = [[after - before for before, after in itertools.pairwise(times)] for times in due.values()]
        assert gaps[0] == pytest.approx(gaps[1])
    one_by_one = [record.ended for record in seen.records if record.workload == "short" and record.arm == "plain"]
    first_end = min(one_by_one)
    begun = [record.begun for record in seen.records if record.workload == "short" and record.arm == "plain"]
    assert sum(time < first_end for time in begun) > 1  # nobody waited for another's end
    assert summarise(seen)["load"]["mode"] == "open"


async def test_failures_are_in_the_figures(stand_ins: Any) -> None:
    long = Workload("long", (Item("fits", "abc", max_tokens=4), Item("not", "a" * 5000, max_tokens=4)), "made")
    settings = BenchSettings((long,), requests=2, blocks=1, options={"temperature": 0.0}, deadline_s=30.0)
    figures = summarise(await run(stand_ins.address, settings, lambda *_: None))["workloads"]["long"]["arms"]["plain"]
    assert (figures["requests"], figures["refused"], figures["failed"]) == (2, 1, 0)
    assert "5011 tokens" in figures["errors"][0]


async def test_a_grammar_ends_its_text_whatever_the_others_ignore(stand_ins: Any) -> None:
    stand_ins.target.model_dir = stand_ins.model_folder
    item = Item("g", "abc", max_tokens=8, options={"regex": "[ab]{3}"})
    settings = BenchSettings(
        (Workload("g", (item,), "made"),), requests=2, blocks=1, options={"temperature": 0.0, "ignore_eos": True}
    )
    seen = await run(stand_ins.address, settings, lambda *_: None)
    assert [(record.error, record.finish_reason) for record in seen.records] == [(None, "stop")] * 4


async def test_a_run_in_which_nothing_goes_well_fails(stand_ins: Any) -> None:
    settings = BenchSettings(WORKLOADS[:1], requests=2, options={"temperature": -1.0}, deadline_s=30.0)
    with pytest.raises(GenerationFailed, match=r"no request went well \(plain\).*temperature"):
        await run(stand_ins.address, settings, lambda *_: None)
    with pytest.raises(Unavailable):
        await run("127.0.0.1:9", BenchSettings(WORKLOADS), lambda *_: None)


async def test_a_deadline_ends_it_with_what_there_is(stand_ins: Any) -> None:
    stand_ins.target.step_s = 0.02
    endless = Workload("endless", (Item("e", "abc", max_tokens=4), Item("e2", "abd", max_tokens=900)), "made")
    settings = BenchSettings(
        (endless,), requests=64, concurrency=2, options={"temperature": 0.0, "ignore_eos": True}, deadline_s=3.0
    )
    seen = await run(stand_ins.address, settings, lambda *_: None)
    assert not seen.complete
    assert not summarise(seen)["complete"]
    assert 0 < len(seen.records) < 128


async def run_command(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "outrider.cluster.cli",
        "bench",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(100):
        output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


async def test_the_command_writes_table_json_and_pictures(stand_ins: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(f'{{"prompt": "Once {n}", "max_tokens": 8}}\n' for n in range(4)))
    words = ("--address", stand_ins.address, "-w", str(mine), "-n", "4", "--blocks", "2", "--ignore-eos")
    outputs = ("--json", str(tmp_path / "out.json"), "--plots", str(tmp_path / "plots"))
    status, output, errors = await run_command(*words, *outputs)
    assert status == 0, errors
    assert "speculative" in output
    assert "costs in ms: pass over" in output
    facts = json.loads((tmp_path / "out.json").read_text())
    assert set(facts["workloads"]["mine"]["arms"]) == {"plain", "speculative"}
    assert set(facts["costs"]["target_ms"]) == {"1", "3", "5", "9"}
    assert len(facts["requests"]) == 8
    assert all(request["arrivals"] for request in facts["requests"])
    assert len(list((tmp_path / "plots").glob("*.png"))) == 4


async def test_the_command_puts_json_alone_on_standard_output(stand_ins: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "Once", "max_tokens": 4}\n')
    words = ("--address", stand_ins.address, "-w", str(mine), "-n", "1", "--no-costs", "--json", "-", "--rate", "20")
    status, output, errors = await run_command(*words)
    assert status == 0, errors
    facts = json.loads(output)
    assert facts["costs"] is None
    assert facts["load"]["rate"] == 20
    assert "speculative" in errors


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        (("-w", "poetry"), 1, "no workload 'poetry'"),
        (("--rate", "0"), 2, "--rate"),
        (("--json", "/nowhere/at/all.json"), 1, "cannot write"),
        (("--peer", "ollama"), 1, "no peer 'ollama'"),
        (("--no-costs",), 1, "no answer from 127.0.0.1:9"),
    ],
)
async def test_the_command_says_what_is_wrong(words: tuple[str, ...], status: int, part: str) -> None:
    code, output, errors = await run_command("--address", "127.0.0.1:9", *words)
    assert (code, output) == (status, "")
    assert part in errors
    assert "Traceback" not in errors

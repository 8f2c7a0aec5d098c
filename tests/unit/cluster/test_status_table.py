"""The tables of ``outrider status --watch``."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from outrider.cluster.commands.status_table import View, render


def facts(steps: int = 10, accepted: int = 6, drafted: int = 8, **group: Any) -> dict[str, Any]:
    return {
        "cluster": "demo",
        "router_id": "router-0",
        "router_address": "h:7070",
        "http_url": "http://h:8000/v1",
        "uptime_s": 7200.0,
        "running": 3,
        "queued": 1,
        "settings": {"num_speculative_tokens": 4, "verifier": "coupled"},
        "groups": [
            {
                "group_id": "group-0",
                "state": "ready",
                "epoch": 2,
                "model": "/models/big/",
                "ranks": [{}, {}],
                "steps": steps,
                "kv_blocks_total": 64,
                "kv_blocks_free": 60,
                "prefix_cache_hit_tokens": 1,
                "prefix_cache_queried_tokens": 4,
                "step_overhead": {"num_steps": 5, "overhead_ms": {"p50": 1.25, "p99": 3.5}},
                **group,
            }
        ],
        "drafts": [
            {
                "draft_id": "draft-0",
                "state": "ready",
                "model": "small",
                "placement": "remote",
                "node": "n1",
                "sessions": 3,
                "proposal_ms": 12.34,
                "num_accepted_tokens": accepted,
                "num_draft_tokens": drafted,
            }
        ],
    }


def shown(view: View) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(render(view))
    return console.file.getvalue()  # type: ignore[attr-defined]


def row(view: View, name: str) -> list[str]:
    [line] = [line for line in shown(view).splitlines() if line.startswith(name)]
    return line.split()


def test_the_first_look() -> None:
    view = View(facts(), 100.0)
    assert "demo  router router-0 at h:7070, up 2.0 h" in shown(view)
    assert "3 running, 1 queued" in shown(view)
    assert row(view, "group-0") == ["group-0", "ready", "2", "big", "2", "10", "-", "1.2/3.5", "ms", "4/64", "25%"]
    assert row(view, "draft-0") == ["draft-0", "ready", "small", "remote", "n1", "3", "12.3", "ms", "75%", "-"]


def test_rates_are_of_what_happened_between_two_looks() -> None:
    view = View(facts(), 100.0).next(facts(steps=30, accepted=7, drafted=12), 104.0)
    assert " 5.0 " in shown(view)
    assert row(view, "draft-0")[-2:] == ["58%", "25%"]
    again = view.next(facts(steps=2, accepted=0, drafted=0), 105.0)  # a router that began anew
    assert " 0.0 " in shown(again)
    assert row(again, "draft-0")[-2:] == ["-", "-"]


def test_what_is_old_is_called_old() -> None:
    view = View(facts(), 100.0).next(facts(steps=30), 101.0).without_answer("no answer from h:7070")
    assert "the facts above are old: no answer from h:7070" in shown(view)
    assert "20.0" not in shown(view)
    assert "old" not in shown(view.next(facts(steps=40), 103.0))


def test_a_target_that_never_came() -> None:
    empty = {
        **facts(),
        "groups": [
            {
                "group_id": "",
                "state": "waiting for a target",
                "epoch": 0,
                "model": "",
                "ranks": [],
                "steps": 0,
                "kv_blocks_total": 0,
                "kv_blocks_free": 0,
                "prefix_cache_hit_tokens": 0,
                "prefix_cache_queried_tokens": 0,
                "step_overhead": None,
            }
        ],
        "drafts": [],
    }
    assert "waiting for a target" in shown(View(empty, 1.0).next(empty, 2.0))


def test_a_long_reason_is_cut() -> None:
    assert "x" * 58 not in shown(View(facts(state="lost: " + "x" * 500), 1.0))

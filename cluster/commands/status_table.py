"""The tables of ``outrider status --watch``: what is shown of the facts, and of how they changed between two looks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Facts = dict[str, Any]


@dataclass(frozen=True)
class View:
    """What was seen.

    Attributes:
        seen_at: when, in seconds.
        step_rates: steps a second of each group, between the last two looks; empty after the first one.
        accepted: of each draft, tokens that became text and tokens that were verified, between the last two looks.
        error: why the latest look failed; empty where it did not.
    """

    facts: Facts
    seen_at: float
    step_rates: dict[str, float] | None = None
    accepted: dict[str, tuple[int, int]] | None = None
    error: str = ""

    def next(self, facts: Facts, now: float) -> View:
        """What is seen after another look."""
        elapsed = max(1e-6, now - self.seen_at)
        steps = {group["group_id"]: group["steps"] for group in self.facts["groups"]}
        drafts = {draft["draft_id"]: draft for draft in self.facts["drafts"]}
        return View(
            facts,
            now,
            {
                group["group_id"]: max(0, group["steps"] - steps[group["group_id"]]) / elapsed
                for group in facts["groups"]
                if group["group_id"] in steps
            },
            {
                draft["draft_id"]: (
                    max(0, draft["num_accepted_tokens"] - drafts[draft["draft_id"]]["num_accepted_tokens"]),
                    max(0, draft["num_draft_tokens"] - drafts[draft["draft_id"]]["num_draft_tokens"]),
                )
                for draft in facts["drafts"]
                if draft["draft_id"] in drafts
            },
        )

    def without_answer(self, error: str) -> View:
        """What is seen after a look that failed: the old facts, and why they are old."""
        return replace(self, step_rates=None, accepted=None, error=error)


def render(view: View) -> RenderableType:
    parts: list[RenderableType] = [_head(view.facts), _groups(view), _drafts(view)]
    if view.error:
        parts.append(Text(f"no answer, the facts above are old: {view.error}", style="bold red"))
    return Group(*parts)


def _head(facts: Facts) -> Text:
    settings = facts["settings"]
    lines = [
        f"{facts['cluster']}  router {facts['router_id']} at {facts['router_address']}, up {_span(facts['uptime_s'])}",
        f"requests {facts['running']} running, {facts['queued']} queued; "
        f"{settings['num_speculative_tokens']} speculative tokens, verifier {settings['verifier']}",
    ]
    if facts.get("http_url"):
        lines.append(f"OpenAI-compatible API {facts['http_url']}")
    return Text("\n".join(lines))


def _groups(view: View) -> Table:
    table = _table(
        "target", "state", "epoch", "model", "ranks", "steps", "steps/s", "overhead p50/p99", "KV blocks", "prefix hits"
    )
    for group in view.facts["groups"]:
        name = group.get("group_id") or "-"
        rate = (view.step_rates or {}).get(group.get("group_id"))
        used = group["kv_blocks_total"] - group["kv_blocks_free"]
        overhead = group.get("step_overhead") or {}
        table.add_row(
            name,
            _state(group["state"]),
            str(group["epoch"]),
            _name(group["model"]),
            str(len(group["ranks"])),
            str(group["steps"]),
            "-" if rate is None else f"{rate:.1f}",
            _milliseconds(overhead) if overhead.get("num_steps") else "-",
            f"{used}/{group['kv_blocks_total']}",
            _share(group["prefix_cache_hit_tokens"], group["prefix_cache_queried_tokens"]),
        )
    return table


def _drafts(view: View) -> Table:
    table = _table("draft", "state", "model", "placement", "node", "sessions", "proposal", "accepted", "accepted now")
    for draft in view.facts["drafts"]:
        now = (view.accepted or {}).get(draft["draft_id"], (0, 0))
        table.add_row(
            draft["draft_id"],
            _state(draft["state"]),
            _name(draft["model"]),
            draft["placement"] or "-",
            draft["node"] or "-",
            str(draft["sessions"]),
            f"{draft['proposal_ms']:.1f} ms" if draft["proposal_ms"] else "-",
            _share(draft["num_accepted_tokens"], draft["num_draft_tokens"]),
            _share(*now),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="ellipsis", no_wrap=column not in ("state", "model"))
    return table


def _state(state: str) -> Text:
    """A reason may be long: its beginning says enough, the log has the rest."""
    style = "green" if state == "ready" else "red" if state.startswith(("lost", "refused")) else "yellow"
    return Text(state if len(state) <= 60 else f"{state[:57]}...", style=style)


def _name(model: str) -> str:
    """The last part of a model's path."""
    return model.rstrip("/").rpartition("/")[2] or "-"


def _milliseconds(overhead: Facts) -> str:
    spread = overhead["overhead_ms"]
    return f"{spread['p50']:.1f}/{spread['p99']:.1f} ms"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _span(seconds: float) -> str:
    units: Iterable[tuple[str, int]] = (("d", 86400), ("h", 3600), ("min", 60))
    for unit, length in units:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"

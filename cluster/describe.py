"""What ``outrider status`` shows: the supervisor's facts and the router's, as one object and as text."""

from __future__ import annotations

from typing import Any

from outrider.cluster.state import ClusterState

Facts = dict[str, Any]

STEP_PARTS = (("beside the model's pass", "overhead_ms"), ("plan", "plan_ms"), ("verify", "verify_ms"))


def merge_status(state: ClusterState | None, router_address: str, router: Facts) -> Facts:
    """One object. ``state`` is None for a cluster on another machine; ``router`` is the answer of its AdminService."""
    supervisor: Facts | None = None
    if state is not None:
        supervisor = {
            "pid": state.supervisor_pid,
            "settings_file": state.settings_file,
            "ray_address": state.ray_address,
            "processes": {child.role: child.pid for child in state.children},
        }
    return {**router, "router_address": router_address, "supervisor": supervisor}


def describe(facts: Facts) -> str:
    """The same for people."""
    lines = [
        f"cluster {facts['cluster']}: router {facts['router_id']} at {facts['router_address']}, "
        f"up {facts['uptime_s']:.0f} s",
        f"requests: {facts['running']} running, {facts['queued']} queued",
        *([f"OpenAI-compatible API: {facts['http_url']}"] if facts.get("http_url") else ()),
    ]
    settings = facts["settings"]
    lines.append(
        f"speculation: {settings['num_speculative_tokens']} tokens, verifier for sampling {settings['verifier']}"
    )
    for group in facts["groups"]:
        used = group["kv_blocks_total"] - group["kv_blocks_free"]
        lines.append(
            f"group {group['group_id']}: {group['state']}, epoch {group['epoch']}, {group['model']} "
            f"({group['dtype']}), {group['steps']} steps, KV blocks {used} of {group['kv_blocks_total']} in use"
        )
        lines += _work(group)
        lines += [f"  rank {rank['rank']}: process {rank['pid']} on {rank['node']}" for rank in group["ranks"]]
    lines += [_draft(draft) for draft in facts["drafts"]]
    return "\n".join(lines)


def _work(group: Facts) -> list[str]:
    """What steps cost beside the model, and what was saved; nothing of what did not happen yet."""
    lines, overhead = [], group.get("step_overhead")
    if overhead and overhead["num_steps"]:
        parts = ", ".join(
            f"{words} {overhead[name]['p50']:.2f} ms (p99 {overhead[name]['p99']:.2f})" for words, name in STEP_PARTS
        )
        lines.append(f"  last {overhead['num_steps']} steps: {parts}")
    lines += _speculation(group.get("speculation") or {})
    counts = [
        _share("prefix cache: {} of {} tokens found", group, "prefix_cache_hit_tokens", "prefix_cache_queried_tokens"),
        _share("lookup: {} of {} tokens accepted", group, "lookup_accepted_tokens", "lookup_draft_tokens"),
        f"{group['preemptions']} preemptions" if group["preemptions"] else "",
    ]
    if any(counts):
        lines.append("  " + "; ".join(filter(None, counts)))
    return lines


def _speculation(facts: Facts) -> list[str]:
    """That a load leaves less of speculation, and why."""
    if not facts.get("paused_for_load") and facts.get("level", "full") != "half":
        return []
    names = (("plain", "without"), ("half", "with half of the tokens"), ("full", "with all"))
    known = [f"{facts[f'{name}_goodput']:.2f} {words}" for name, words in names if facts[f"{name}_goodput"]]
    what = "paused" if facts["paused_for_load"] else "half of the tokens"
    return [f"  speculation at {facts['num_streams']} streams: {what}; tokens/s of each: {', '.join(known)}"]


def _share(words: str, group: Facts, part: str, whole: str) -> str:
    return words.format(group[part], group[whole]) if group[whole] else ""


def _draft(draft: Facts) -> str:
    proposed, accepted = draft["num_draft_tokens"], draft["num_accepted_tokens"]
    rate = f", {accepted / proposed:.0%} of {proposed} tokens accepted" if proposed else ""
    return (
        f"draft {draft['draft_id']}: {draft['state']}, {draft['model']}, {draft['sessions']} sessions, "
        f"process {draft['pid']} on {draft['node']} at {draft['address']}{rate}"
    )

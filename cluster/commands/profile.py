"""``outrider profile``: what a pass of the target, a drafted token and a hop cost on a running cluster."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cluster.commands.common import Json, note
from outrider.cluster.commands.curves import curves as split_into_curves
from outrider.cluster.commands.curves import joined
from outrider.cluster.commands.router_options import RouterOptions, with_router_options
from outrider.core.errors import DeadlineExceeded, OutriderError

if TYPE_CHECKING:
    from outrider.client import Endpoint
    from outrider.v1 import admin_pb2

_NUMBERS = re.compile(r"\s*\d+\s*(,\s*\d+\s*)*,?\s*")

Tell = Callable[[str, int, int], None]


@with_router_options
def profile(
    *,
    rows: Annotated[
        str | None,
        typer.Option("--rows", help="Rows of a pass, such as 1,5,9. Default: twelve numbers from 1 to 32."),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option("--contexts", help="Positions in the cache, such as 128,1024. Default: 128 to 4096 that fit."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", help="Sequences of a pass, such as 1,8. Default: 1.", metavar="TEXT")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", help="Measured passes of each kind.", min=1, max=1000)] = 5,
    proposals: Annotated[
        int, typer.Option("--proposals", help="Proposals to ask of drafts; 0: none.", min=0, max=1000)
    ] = 40,
    curves: Annotated[
        bool,
        typer.Option(
            "--curves",
            help="Rows, contexts and batches each along the least of the others, not all of their combinations. "
            "Default then: 1 to 17 rows, 128 to 4000 positions, 1 to 32 sequences.",
        ),
    ] = False,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Write pictures (PNG) here.", metavar="FOLDER", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that it may take.", min=1)] = 900.0,
    router: RouterOptions,
    as_json: Json = False,
) -> None:
    """Measure what a pass over 1 to 32 rows, a drafted token and a hop cost on a running cluster.

    Requests go first: it waits while some run, and they wait for one pass at most.
    """
    from outrider.v1 import admin_pb2

    request = admin_pb2.ProfileRequest(
        rows=_numbers("--rows", rows),
        contexts=_numbers("--contexts", contexts),
        num_sequences=_numbers("--batch", batch),
        num_runs=runs,
        num_proposals=proposals,
    )
    endpoint = router.endpoint()
    requests = split_into_curves(request) if curves else [request]
    result = _with_bar(lambda tell: asyncio.run(_measure_all(endpoint, requests, timeout, tell)))
    facts = as_facts(result)
    for line in facts["left_out"]:
        note(f"left out: {line}")
    print(json.dumps(facts) if as_json else as_table(facts))
    if plots is not None:
        from outrider.bench.plots import draw_costs

        for path in draw_costs(facts, plots):
            note(f"wrote {path}")


def as_facts(result: admin_pb2.ProfileResult) -> dict[str, Any]:
    """What ``--json`` prints. Of several contexts and batches ``target_ms`` is of the smallest."""
    passes: list[dict[str, Any]] = [
        {
            "context": cost.context,
            "num_sequences": cost.num_sequences,
            "rows": cost.rows,
            "num_runs": cost.num_runs,
            **{name: _spread(getattr(cost, name)) for name in ("forward_ms", "overhead_ms", "plan_ms", "verify_ms")},
        }
        for cost in result.passes
    ]
    smallest = min((cost["num_sequences"] for cost in passes), default=0)
    plain = [cost for cost in passes if cost["num_sequences"] == smallest]
    by_context: dict[str, dict[str, float]] = {}
    for cost in plain:
        by_context.setdefault(str(cost["context"]), {})[str(cost["rows"])] = cost["forward_ms"]["p50"]
    least_rows = min((cost["rows"] for cost in plain), default=0)
    first = min((cost["context"] for cost in plain), default=0)
    overheads = [cost for cost in plain if cost["rows"] == least_rows]
    drafts: list[dict[str, Any]] = [
        {
            "draft_id": draft.draft_id,
            "num_proposals": draft.num_proposals,
            "tokens_per_proposal": round(draft.tokens_per_proposal, 3),
            "ms_per_token": _spread(draft.ms_per_token),
            "ms_per_proposal": _spread(draft.ms_per_proposal),
        }
        for draft in result.drafts
    ]
    return {
        "target_ms": by_context.get(str(first), {}),
        "draft_ms": min((draft["ms_per_token"]["p50"] for draft in drafts), default=None),
        "overhead_ms": next((cost["overhead_ms"]["p50"] for cost in overheads if cost["context"] == first), None),
        "target_ms_by_context": by_context,
        "overhead_ms_by_context": {str(cost["context"]): cost["overhead_ms"]["p50"] for cost in overheads},
        "passes": passes,
        "drafts": drafts,
        "group": {
            "group_id": result.group_id,
            "epoch": result.epoch,
            "model": result.model,
            "dtype": result.dtype,
            "tensor_parallel_size": result.tensor_parallel_size,
        },
        "left_out": list(result.left_out),
    }


def as_table(facts: dict[str, Any]) -> str:
    """Times of passes by rows and context, then drafts; in milliseconds."""
    group = facts["group"]
    lines = [f"{group['model']}, {group['dtype']}, {group['tensor_parallel_size']} rank(s); medians in ms"]
    for count in dict.fromkeys(cost["num_sequences"] for cost in facts["passes"]):
        passes = {(cost["context"], cost["rows"]): cost for cost in facts["passes"] if cost["num_sequences"] == count}
        contexts = list(dict.fromkeys(context for context, _ in passes))
        rows = list(dict.fromkeys(rows for _, rows in passes))
        lines += ["", f"forward pass, {count} sequence(s); in brackets: of one with {rows[0]} row(s)"]
        lines.append(f"{'context':>9}" + "".join(f"{f'{each} rows':>18}" for each in rows) + f"{'overhead':>12}")
        for context in contexts:
            one = passes[context, rows[0]]["forward_ms"]["p50"]
            cells = "".join(_cell(passes.get((context, each)), one) for each in rows)
            lines.append(f"{context:>9}{cells}{passes[context, rows[0]]['overhead_ms']['p50']:>12.3f}")
    for draft in facts["drafts"]:
        each, whole = draft["ms_per_token"]["p50"], draft["ms_per_proposal"]["p50"]
        lines.append(
            f"draft {draft['draft_id']}: {each:.3f} for each token, {whole:.3f} for a proposal of "
            f"{draft['tokens_per_proposal']:.1f} ({draft['num_proposals']} proposals)"
        )
    if not facts["drafts"]:
        lines.append("no draft proposed anything")
    return "\n".join(lines)


async def _measure_all(
    router: Endpoint, requests: Sequence[admin_pb2.ProfileRequest], timeout: float, tell: Tell
) -> admin_pb2.ProfileResult:
    """One after the other, within the time for all."""
    begun = time.monotonic()
    results: list[admin_pb2.ProfileResult] = []
    for request in requests:
        left = timeout - (time.monotonic() - begun)
        if left <= 0:
            raise DeadlineExceeded(f"{len(results)} of {len(requests)} curves were measured in {timeout:g} s")
        results.append(await measure(router, request, left, tell))
    return joined(results)


async def measure(
    router: Endpoint, request: admin_pb2.ProfileRequest, timeout: float, tell: Tell
) -> admin_pb2.ProfileResult:
    """Have a router measure. Raises what ``outrider.core.errors`` holds."""
    import grpc

    from outrider.v1 import admin_pb2_grpc

    try:
        async with router.open_channel() as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            async for response in stub.Profile(request, timeout=timeout, metadata=router.metadata):
                if response.HasField("result"):
                    return response.result
                tell(response.progress.stage, response.progress.done, response.progress.total)
    except grpc.aio.AioRpcError as error:
        raise await router.error_of(error) from error
    raise OutriderError("the router ended the profile without a result")


def _with_bar(work: Callable[[Tell], admin_pb2.ProfileResult]) -> admin_pb2.ProfileResult:
    """With a bar where standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("waiting for the group", total=None)

        def tell(stage: str, done: int, total: int) -> None:
            bars.update(bar, description=stage, completed=done, total=total)

        return work(tell)


def _numbers(option: str, text: str | None) -> Sequence[int]:
    if text is None:
        return ()
    if not _NUMBERS.fullmatch(text):
        raise typer.BadParameter(f"{text[:60]!r} is not a list such as 1,5,9.", param_hint=f"'{option}'")
    numbers = [int(number) for number in text.split(",") if number.strip()]
    if any(not 1 <= number < 1 << 31 for number in numbers):
        raise typer.BadParameter("numbers from 1 on are wanted.", param_hint=f"'{option}'")
    return numbers


def _cell(cost: dict[str, Any] | None, one: float) -> str:
    """Empty where it was not measured."""
    if cost is None:
        return " " * 18
    value = cost["forward_ms"]["p50"]
    return f"{value:>10.2f} ({value / one:4.2f})" if one else f"{value:>10.2f}       "


def _spread(spread: admin_pb2.Spread) -> dict[str, float]:
    return {name: round(getattr(spread, name), 4) for name in ("p50", "min", "max")}

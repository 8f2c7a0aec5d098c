"""The scheduler's n-gram lookup and prefix cache on real ranks: the router makes one proposal, and all ranks run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.core.sampling import Sampling, Verifier
from outrider.router.requests import NewRequest
from outrider.router.scheduler import Scheduler
from outrider.router.settings import SchedulerSettings

NUM_TOKENS = 40
PROMPT = tuple(range(7, 27))
GREEDY = Sampling(temperature=0.0, verifier=Verifier.GREEDY)
COUPLED = Sampling(temperature=0.5, top_k=2, seed=5, verifier=Verifier.COUPLED)


def decode(client: Any, settings: SchedulerSettings) -> tuple[dict[str, list[int]], Scheduler]:
    """Two requests side by side, then both again. ``complete`` raises if a rank holds other lengths than planned."""
    assert client.info is not None
    scheduler = Scheduler(client.info, settings, epoch=client.epoch)
    texts: dict[str, list[int]] = {}
    now = 0.0
    for turn in (1, 2):
        for sampling in (GREEDY, COUPLED):
            request_id = f"{sampling.verifier.label} {turn}"
            scheduler.add(NewRequest(request_id, turn, PROMPT, sampling, max_tokens=NUM_TOKENS), now)
            texts[request_id] = []
        while (plan := scheduler.schedule(now)) is not None:
            result = client.run(plan)
            assert len(result.ranks) == 2
            assert len({(report.num_sequences, report.committed_checksum) for report in result.ranks}) == 1
            now += 1.0
            for committed in scheduler.complete(result, now):
                texts[committed.request_id] += committed.tokens
    scheduler.check_integrity()
    return texts, scheduler


def test_v3_two_ranks_agree_on_what_the_router_looked_up(start_group: Callable[..., Any]) -> None:
    group = start_group(2)
    with_lookup = group.attach()
    fast, scheduler = decode(with_lookup, SchedulerSettings(lookup_lengths=(1, 3)))
    with_lookup.close()
    snapshot = scheduler.snapshot()
    assert 0 < snapshot.num_lookup_accepted < snapshot.num_lookup_tokens, (
        "unknown: lookup was never right, or never wrong"
    )
    assert snapshot.prefix_cache_hits == 2 * 16  # the second turn's prompts; the first two began at once
    without = group.attach()
    plain, scheduler = decode(without, SchedulerSettings(enable_prefix_caching=False))
    without.close()
    assert scheduler.snapshot().num_steps == 2 * NUM_TOKENS
    assert fast == plain
    group.stop()

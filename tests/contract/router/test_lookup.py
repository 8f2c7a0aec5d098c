"""n-gram lookup behind a real router: no draft worker, or one beside it."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.testing import ToyModel

PROMPT = "abcab"
# From position 5 on the text goes on as it began, with a slip now and then.
SCRIPT = {position: ord("abc"[position % 3]) + (position % 23 == 0) for position in range(400)}
LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "verifier": "rejection"}])
@pytest.mark.parametrize("num_drafts", [0, 1])
async def test_what_was_said_before_is_proposed(world: Any, options: dict[str, Any], num_drafts: int) -> None:
    target = await world.target(ToyModel(script=SCRIPT))
    for _ in range(num_drafts):
        await world.draft()  # a model of its own, which knows nothing of the script
    server = await world.router(speculation=LOOKUP)
    await world.drafts_ready(server, num_drafts)
    client = await world.client(server)
    completion = await client.generate(PROMPT, max_tokens=90, **options)
    assert list(completion.token_ids) == [SCRIPT[position] for position in range(5, 95)]
    spec = completion.speculation
    assert "ngram" in spec.drafter
    assert spec.target_calls < 60
    assert 0 < server.group.scheduler.snapshot().num_lookup_accepted <= spec.num_accepted_tokens
    assert target.sent_rows == 0 or num_drafts
    assert target.faults == []
    server.group.scheduler.check_integrity()

"""A request whose step kills the target, whenever it runs: it ends, and everybody else gets the whole text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.client import GenerationFailed
from outrider.core.plan import StepPlan, StepResult
from outrider.testing import StandInTarget, ToyModel

BAD = "poison"


@dataclass
class FragileTarget(StandInTarget):
    """Its stream breaks in a step with the prompt that it cannot stand."""

    num_deaths: int = 0

    def run(self, plan: StepPlan) -> StepResult:
        if any(sequence.tokens[: len(BAD)] == tuple(BAD.encode()) for sequence in plan.sequences):
            self.num_deaths += 1
            raise RuntimeError("killed by the test")
        return super().run(plan)


async def test_a_request_that_kills_the_target_is_isolated(world: Any) -> None:
    made = FragileTarget(ToyModel(), fingerprint=world.fingerprint, model_dir=world.folder, step_s=0.005)
    target = await world.stack.enter_async_context(made)
    world.announce("target", target.group_id, target.record())
    server = await world.router()
    client = await world.client(server)
    prompts = ["Once upon", "a time", "there was"]
    tasks = [asyncio.create_task(client.generate(prompt, max_tokens=80, temperature=0)) for prompt in prompts]
    await world.until(lambda: target.num_steps > 5, "they run")
    with pytest.raises(GenerationFailed, match="failed 3 times in steps of this request"):
        await client.generate(BAD, max_tokens=5, temperature=0)
    for prompt, task in zip(prompts, tasks, strict=True):
        assert list((await task).token_ids) == ToyModel().output(list(prompt.encode()), 80)
    assert target.num_deaths == 3
    assert target.faults == []
    server.group.scheduler.check_integrity()

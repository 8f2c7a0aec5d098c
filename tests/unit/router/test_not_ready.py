"""A sequence whose grammar is still being compiled is asked again, and nobody else notices."""

from __future__ import annotations

from dataclasses import replace

from outrider.core.plan import SequenceError, StepPlan, StepResult
from outrider.core.sampling import Sampling, Verifier

NOT_READY_STEPS = 3


def test_a_sequence_that_is_not_ready_runs_its_last_row_again(toy) -> None:
    world = toy.World()
    world.join("d")
    run, rows = world.group.run, []

    def not_ready_at_first(plan: StepPlan) -> StepResult:
        result, outcomes = run(plan), []
        for part, outcome in zip(plan.sequences, result.sequences, strict=True):
            is_first = part.seq_id == min(world.group.used_ids)
            if is_first and part.verified_rows and len(rows) < NOT_READY_STEPS:
                rows.append(part.num_text_tokens)
                world.group.sequences[part.seq_id].kv_len = part.kv_len + part.num_text_tokens - 1
                late = replace(outcome, error=SequenceError.NOT_READY, committed=(), num_accepted=0, logprobs=())
                outcomes.append(late)
            else:
                outcomes.append(outcome)
        return replace(result, sequences=tuple(outcomes))

    world.group.run = not_ready_at_first
    sampling = Sampling(temperature=0.0, verifier=Verifier.GREEDY, prompt_logprobs=1, logprobs=0)
    world.add("slow", [1, 2, 3, 4, 5, 6], max_tokens=6, sampling=sampling)
    world.add("other", [7, 8, 9], max_tokens=6)
    for _ in range(NOT_READY_STEPS):
        world.step()
        assert world.texts["slow"] == []
    assert rows == [6, 1, 1]
    assert len(world.texts["other"]) >= NOT_READY_STEPS  # the others go on
    while len(world.ends) < 2:
        world.step()
    assert len(world.texts["slow"]) == len(world.texts["other"]) == 6

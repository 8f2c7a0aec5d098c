"""What a group's answers may be."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.errors import Unavailable
from outrider.core.plan import StepPlan
from outrider.router.target_stream import TargetStream
from outrider.v1 import common_pb2, target_pb2


@pytest.mark.parametrize(("epoch", "step"), [(3, 7), (2, 8), (4, 8)])
async def test_the_answer_to_another_step_breaks_the_stream(
    epoch: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler drops such a result, so that its own step would stay in flight, and nobody would notice."""

    async def read(*_: Any) -> target_pb2.StepsResponse:
        return target_pb2.StepsResponse(header=common_pb2.Header(epoch=epoch), result=target_pb2.StepResult(step=step))

    stream = TargetStream("127.0.0.1:1", scheduler_id="s", epoch=3)
    monkeypatch.setattr(stream, "_read", read)
    with pytest.raises(Unavailable, match="answered step 8 of epoch 3 with"):
        await stream.step(StepPlan(3, 8, ()), 1.0)
    await stream.close()

"""What a frontend counts of its requests."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from outrider.core.errors import InvalidRequest, Unavailable
from outrider.router.request_meter import RequestMeter
from outrider.router.transcript import Update
from outrider.v1 import group_pb2


def update(count: int, reason: int | None = None) -> Update:
    finish = group_pb2.Finish(reason=reason) if reason is not None else None  # type: ignore[arg-type]
    return Update(1, 1, 0, (7,) * count, finish=finish)


def test_messages_and_tokens_are_counted_apart() -> None:
    meter = RequestMeter()
    with meter.request() as timer:
        timer.admitted(3, 1)
        for count in (1, 4, 2):
            timer.took(0, update(count))
        timer.took(0, update(0, group_pb2.FINISH_REASON_STOP))
    assert (meter.first_token.count, meter.gap.count, meter.per_token.count) == (1, 2, 6)
    assert meter.per_token.sum == pytest.approx(meter.gap.sum)
    assert (meter.prompt_tokens.sum, meter.generation_tokens.sum, meter.whole.count) == (3, 7, 1)
    assert meter.finished == {"stop": 1, "length": 0, "abort": 0}


def test_choices_have_gaps_of_their_own_and_one_first_token() -> None:
    meter = RequestMeter()
    with meter.request() as timer:
        timer.admitted(3, 2)
        for choice in (0, 1, 1):
            timer.took(choice, update(1))
        for choice in (0, 1):
            timer.took(choice, update(0, group_pb2.FINISH_REASON_LENGTH))
    assert (meter.first_token.count, meter.gap.count, meter.whole.count) == (1, 1, 1)
    assert meter.finished["length"] == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidRequest("n", 0, "1"), "INVALID_ARGUMENT"), (Unavailable("x"), "UNAVAILABLE"), (ValueError(), "INTERNAL")],
)
def test_errors_are_counted_by_their_status(error: Exception, code: str) -> None:
    meter = RequestMeter()
    with pytest.raises(type(error)), meter.request():
        raise error
    assert {name: count for name, count in meter.errors.items() if count} == {code: 1}
    assert (sum(meter.finished.values()), meter.whole.count) == (0, 0)


@pytest.mark.parametrize("ending", [GeneratorExit, asyncio.CancelledError])
def test_a_client_that_goes_away_is_an_abort_unless_all_was_said(ending: type[BaseException]) -> None:
    meter = RequestMeter()
    leave(meter, 2, ending)
    assert meter.finished == {"stop": 1, "length": 0, "abort": 1}
    leave(meter, 1, ending)
    assert meter.finished == {"stop": 2, "length": 0, "abort": 1}
    assert meter.whole.count == 1


def leave(meter: RequestMeter, num_choices: int, ending: type[BaseException]) -> None:
    """Go away once one of the choices has ended."""
    with contextlib.suppress(ending), meter.request() as timer:
        timer.admitted(3, num_choices)
        timer.took(0, update(1, group_pb2.FINISH_REASON_STOP))
        raise ending

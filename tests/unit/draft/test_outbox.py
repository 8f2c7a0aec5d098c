"""What waits for a scheduler that reads slowly."""

import asyncio

from outrider.core.proposal import Proposal
from outrider.workers.draft.messages import Address, Event, EvictionReason, NeedTokens
from outrider.workers.draft.outbox import Outbox


def proposed(session_id: int, proposal_id: int) -> Event:
    return Event(Address(1, session_id, 1, 1), Proposal(proposal_id, base_len=0, base_hash=0, tokens=(1,)))


async def drain(outbox: Outbox) -> list[Event]:
    outbox.close()
    events = []
    while (event := await outbox.get()) is not None:
        events.append(event)
    return events


async def test_only_the_newest_proposal_of_a_session_waits() -> None:
    outbox = Outbox()
    for number in range(1000):
        outbox.put(proposed(number % 3, number))
    assert len(outbox) == 3
    assert [event.body.proposal_id for event in await drain(outbox)] == [997, 998, 999]  # type: ignore[union-attr]


async def test_other_answers_all_wait_in_order() -> None:
    outbox = Outbox()
    need = Event(Address(1, 1, 1, 1), NeedTokens(3))
    evicted = Event(Address(1, 1, 1, 1), EvictionReason.NO_MEMORY)
    for event in (proposed(1, 1), need, proposed(2, 2), evicted, proposed(1, 3)):
        outbox.put(event)
    assert await drain(outbox) == [need, proposed(2, 2), evicted, proposed(1, 3)]


async def test_an_eviction_takes_the_waiting_proposal_along() -> None:
    outbox = Outbox()
    evicted = Event(Address(1, 1, 1, 1), EvictionReason.NO_MEMORY)
    for event in (proposed(1, 1), proposed(2, 2), evicted):
        outbox.put(event)
    assert await drain(outbox) == [proposed(2, 2), evicted]


async def test_a_proposal_that_was_taken_is_not_replaced() -> None:
    outbox = Outbox()
    outbox.put(proposed(1, 1))
    assert await outbox.get() == proposed(1, 1)
    outbox.put(proposed(1, 2))
    assert await drain(outbox) == [proposed(1, 2)]


async def test_get_waits_for_an_answer_or_the_end() -> None:
    outbox = Outbox()
    getting = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    assert not getting.done()
    outbox.put(proposed(1, 1))
    assert await asyncio.wait_for(getting, 10) == proposed(1, 1)
    getting = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.close()
    assert await asyncio.wait_for(getting, 10) is None


async def test_an_error_goes_before_what_waits() -> None:
    outbox = Outbox()
    outbox.put(proposed(1, 1))
    outbox.close("the device is gone")
    outbox.close()  # the first word stands
    assert await outbox.get() is None
    assert outbox.error == "the device is gone"

"""The choices of a request. They share its prompt, are taken in or refused together, and end one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from outrider.core.errors import Conflict, InvalidRequest, Overloaded
from outrider.core.prefix import HashedTokens
from outrider.router.lookup import Lookup
from outrider.router.policy import Throttle
from outrider.router.requests import Cutter, NewRequest, Request, SpeculationStats


@dataclass(eq=False)
class Family:
    """The choices of one request.

    Attributes:
        members: those that have not ended, by their numbers.
        cached_prompt_tokens: what the prefix cache held of the prompt when the first of them began; None before that.
    """

    members: dict[int, Request] = field(default_factory=dict)
    cached_prompt_tokens: int | None = None


class RequestBook:
    """Every request that has not ended, in the order in which they came."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def __iter__(self) -> Iterator[Request]:
        """Each choice of each request."""
        for family in self._families.values():
            yield from family.members.values()

    def __len__(self) -> int:
        return sum(len(family.members) for family in self._families.values())

    def choices(self, request_id: str) -> list[Request]:
        """Those of one request that have not ended."""
        family = self._families.get(request_id)
        return list(family.members.values()) if family is not None else []

    def find(self, request_id: str, choice: int) -> Request | None:
        family = self._families.get(request_id)
        return family.members.get(choice) if family is not None else None

    def check_room(self, new: NewRequest, most: int) -> None:
        """Raises ``Conflict``, ``Overloaded`` or ``InvalidRequest`` unless the request can join ``most`` in all."""
        if new.request_id in self._families:
            raise Conflict(f"request {new.request_id} runs already; choose another request_id or abort it first")
        if not 1 <= new.num_choices <= most:
            raise InvalidRequest("n", new.num_choices, f"from 1 to {most}, which is what may run or wait here at once")
        if len(self) + new.num_choices > most:
            raise Overloaded(f"{len(self)} requests run or wait and the queue is full; try again later")

    def add(self, family: Family) -> None:
        first = next(iter(family.members.values()))
        self._families[first.new.request_id] = family

    def remove(self, request: Request) -> None:
        """A choice has ended."""
        del request.family.members[request.choice]
        if not request.family.members:
            del self._families[request.new.request_id]


def new_family(
    new: NewRequest,
    *,
    end_len: int,
    num_speculative_tokens: int,
    make_cutter: Callable[[NewRequest], Cutter],
    lookup_lengths: tuple[int, int] | None = None,
    queued_at: float | None = None,
) -> Family:
    """The choices that a request asks for. The prompt's log-probabilities are an affair of the first one.

    ``lookup_lengths``: of the n-grams that are looked up for it, the shortest and the longest; None for no lookup.
    ``queued_at``: when the request came.
    """
    lookup_lengths = lookup_lengths if num_speculative_tokens else None
    family = Family()
    for choice in range(new.num_choices):
        sampling = replace(new.sampling, choice=choice, prompt_len=len(new.prompt_tokens))
        own = replace(new, sampling=sampling if choice == 0 else replace(sampling, prompt_logprobs=None))
        family.members[choice] = Request(
            new=own,
            text=HashedTokens(own.prompt_tokens),
            end_len=end_len,
            num_speculative_tokens=num_speculative_tokens,
            cutter=make_cutter(own),
            stats=SpeculationStats(sampling.verifier, acceptance_histogram=(0,) * (num_speculative_tokens + 1)),
            throttle=Throttle(),
            lookup_throttle=Throttle(),
            lookup=Lookup(*lookup_lengths) if lookup_lengths is not None else None,
            family=family,
            queued_at=queued_at,
        )
    return family

"""The transcripts of a group's requests: those that run, and for a while those that have ended."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.errors import Conflict, InvalidRequest, NotFound, OutriderError
from outrider.router.requests import Committed, NewRequest
from outrider.router.transcript import Transcript, finish_to_wire


class Archive:
    """Transcripts by request id, one for each choice. The newest request of an id is the one that is kept."""

    def __init__(self, spell: Callable[[int], str]) -> None:
        """``spell`` gives the text of a token."""
        self._spell = spell
        self._choices: dict[str, list[Transcript]] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests of which a choice has not ended."""
        return len(self.unfinished())

    def unfinished(self) -> list[str]:
        return [request_id for request_id, choices in self._choices.items() if not _are_finished(choices)]

    def check_free(self, request_id: str) -> None:
        """Raises ``Conflict`` while a request of that id runs."""
        if not _are_finished(self._choices.get(request_id, [])):
            raise Conflict(f"request {request_id} runs already; choose another request_id or abort it first")

    def open(self, request: NewRequest) -> None:
        """Begin the transcripts of a request, in place of older ones of its id."""
        self._choices[request.request_id] = [Transcript(request) for _ in range(request.num_choices)]

    def find(self, request_id: str, generation: int = 0, choice: int = 0) -> Transcript:
        """Generation 0 stands for the newest. Raises ``NotFound``, or ``InvalidRequest`` for a choice too many."""
        choices = self._choices.get(request_id)
        if choices is None or generation not in (0, choices[0].generation):
            raise NotFound(f"no request {request_id} is known here")
        if not 0 <= choice < len(choices):
            raise InvalidRequest("choice", choice, f"below {len(choices)}, the number of choices of the request")
        return choices[choice]

    def is_finished(self, request_id: str) -> bool:
        return _are_finished(self._choices.get(request_id, []))

    def deliver(self, epoch: int, committed: Committed, now: float) -> None:
        """Write down what was committed; what belongs to an older request of that id is dropped."""
        choices = self._choices.get(committed.request_id)
        if choices is None or choices[0].generation != committed.generation:
            return
        transcript, finish = choices[committed.choice], committed.finish
        if committed.tokens:
            transcript.extend(epoch, committed)
        if finish is not None:
            named = finish.stop_token is not None and finish.stop_token in transcript.request.stop_token_ids
            text = self._spell(finish.stop_token) if named and finish.stop_token is not None else ""
            transcript.finish(finish_to_wire(finish, text), now)

    def fail(self, request_id: str, error: OutriderError, now: float) -> None:
        """No choice of a request can go on."""
        for transcript in self._choices.get(request_id, []):
            if transcript.finished_at is None:
                transcript.fail(error, now)

    def forget(self, ended_before: float) -> None:
        """Drop the requests whose last choice ended before a time."""
        for request_id, choices in list(self._choices.items()):
            if all(choice.finished_at is not None and choice.finished_at < ended_before for choice in choices):
                del self._choices[request_id]


def _are_finished(choices: list[Transcript]) -> bool:
    return all(choice.finished_at is not None for choice in choices)

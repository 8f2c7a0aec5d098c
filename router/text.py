"""From tokens to text, piece by piece: characters that several tokens share, and stop strings.

Nothing here depends on how the tokens arrive: one by one or in blocks of any size, the same tokens give the same text
and the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"  # what decoders put in place of bytes that are no UTF-8
MAX_PARTIAL_TOKENS = 3  # an incomplete UTF-8 character has at most 3 bytes, so it spans at most that many tokens
PROMPT_WINDOW = 6  # prompt tokens that decide how the first output token is spelt
MAX_PROMPT_WINDOW = 24

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """Turns tokens into text as they come; what it has emitted is never taken back.

    A token's spelling depends on those before it (a leading space in SentencePiece vocabularies, a character whose
    bytes are spread over tokens), so a short *window* of tokens is decoded again for each one, and what it says beyond
    the ``sent`` characters emitted before is new. The window starts at the token after which the text was complete
    last but one, so the cost for each token does not grow with the text. This is the prefix / read offset method.

    An incomplete character is held back. Bytes that cannot become one any more are emitted as U+FFFD, one for each
    that the decoder gives.
    """

    def __init__(self, decode: Decode, *, skip: Collection[int] = (), prompt: Sequence[int] = ()) -> None:
        """``decode`` spells a list of tokens; those in ``skip`` (special ones) have no text; ``prompt`` precedes."""
        self._decode = decode
        self._skip = frozenset(skip)
        self._window: list[int] = []
        self._read = 0  # tokens of the window after which the text was complete last
        self._sent = 0  # characters of the window's text that were emitted
        self._owed = 0  # replacements at the start of what follows that stand for the prompt's own bytes
        self._start_after([token for token in prompt[-4 * MAX_PROMPT_WINDOW :] if token not in self._skip])

    def push(self, token: int) -> str:
        """The text that is final now and was not before."""
        if token in self._skip:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            new = self._emit(text, len(text))
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._sent = len(self._decode(self._window))
            return new
        if len(self._window) - self._read <= MAX_PARTIAL_TOKENS:
            return self._emit(text, len(text.rstrip(REPLACEMENT)))
        # Not valid UTF-8: only the last replacement may still become a character. Go on from the tokens it may lie in.
        new = self._emit(text, len(text) - 1)
        self._window = self._window[-MAX_PARTIAL_TOKENS:]
        self._read = 0
        self._sent = len(self._decode(self._window)) - 1
        return new

    def flush(self) -> str:
        """What was held back. The text ends here; more tokens may not follow."""
        text = self._decode(self._window) if self._window else ""
        return self._emit(text, len(text))

    def _emit(self, text: str, end: int) -> str:
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        if new and self._owed:
            while self._owed and new.startswith(REPLACEMENT):
                new, self._owed = new[1:], self._owed - 1
            self._owed = 0
        return new

    def _start_after(self, prompt: Sequence[int]) -> None:
        # A character that the prompt left incomplete belongs to the output, if the output completes it: it counts as
        # not sent. If it stays incomplete its replacement is the prompt's, and the output does not repeat it (_owed).
        end = len(prompt)
        for size in range(min(MAX_PARTIAL_TOKENS, len(prompt)) + 1):
            if not self._decode(prompt[: len(prompt) - size]).endswith(REPLACEMENT):
                end = len(prompt) - size
                break
        # Start the window at a character's first byte: decoders that fall back to bytes judge a run of them as a whole.
        start = max(0, end - PROMPT_WINDOW)
        while start > max(0, end - MAX_PROMPT_WINDOW) and self._decode(prompt[start:end]).startswith(REPLACEMENT):
            start -= 1
        self._window = list(prompt[start:])
        self._read = end - start
        text = self._decode(self._window)
        if end < len(prompt):
            self._sent = max(len(self._decode(prompt[start:end])), len(text.rstrip(REPLACEMENT)))
        else:  # complete, or no token border nearby is one between characters either
            self._sent = len(text) - text.endswith(REPLACEMENT)
        self._owed = len(text) - self._sent


class StopMatcher:
    """Looks for stop strings in text that comes in pieces.

    The stop string that is complete first ends the text; of several that are complete at the same character, the
    longest. Text that may be the beginning of a stop string is held back. Each stop string is followed by a
    Knuth-Morris-Pratt automaton, so a character costs the same however long the strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` must not hold an empty string."""
        if not all(stops):
            raise ValueError("an empty stop string would end every text at once")
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""

    def feed(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """Text that is final, and the stop string that ended it, if one did. After that nothing more may be fed.

        Where it does not count, a stop string that is complete within ``text`` is text like any other; one that begins
        there and is complete later counts.
        """
        buffer = self._held + text
        for index in range(len(self._held), len(buffer)):
            for number, stop in enumerate(self._stops):
                length = self._advance(number, stop, buffer[index])
                if length == len(stop) and counts:
                    self._held = ""
                    return buffer[: index + 1 - length], stop
                if length == len(stop):
                    self._matched[number] = self._borders[number][-1]
        keep = max(self._matched, default=0)
        end = len(buffer) - keep
        self._held = buffer[end:]
        return buffer[:end], None

    def flush(self) -> str:
        """What was held back, now that the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, number: int, stop: str, character: str) -> int:
        length, borders = self._matched[number], self._borders[number]
        while length and stop[length] != character:
            length = borders[length - 1]
        if stop[length] == character:
            length += 1
        self._matched[number] = length
        return length


class StopCutter:
    """Says at which token the output ends because of a stop string (``Cutter`` of the scheduler)."""

    def __init__(self, detokenizer: IncrementalDetokenizer, matcher: StopMatcher, *, min_tokens: int = 0) -> None:
        """What is complete with one of the first ``min_tokens`` tokens does not count."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._uncounted = min_tokens

    def feed(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """How many of the tokens are kept, and the stop string that the last of them completed."""
        for index, token in enumerate(tokens):
            _, matched = self._matcher.feed(self._detokenizer.push(token), counts=self._uncounted <= 0)
            self._uncounted -= 1
            if matched is not None:
                return index + 1, matched
        return len(tokens), None


class TextStream:
    """What a client sees of a stream of tokens: final text, cut before a stop string or, if it likes, behind it."""

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """``min_tokens`` as for ``StopCutter``."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._uncounted = min_tokens
        self._include_stop = include_stop
        self._ended = False

    def feed(self, tokens: Sequence[int]) -> str:
        """Text that these tokens made final."""
        pieces = []
        for token in tokens:
            if self._ended:
                break
            text, matched = self._matcher.feed(self._detokenizer.push(token), counts=self._uncounted <= 0)
            self._uncounted -= 1
            pieces.append(text)
            if matched is not None:
                self._ended = True
                pieces.append(matched if self._include_stop else "")
        return "".join(pieces)

    def finish(self, last: Sequence[int] = ()) -> str:
        """The rest of the text, when no token follows; ``last`` is spelt too, without a look for stop strings."""
        if self._ended:
            return ""
        self._ended = True
        # What only an incomplete character's replacement would complete does not count: the scheduler did not see it.
        rest = [self._matcher.flush(), *(self._detokenizer.push(token) for token in last), self._detokenizer.flush()]
        return "".join(rest)


def _borders(pattern: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders

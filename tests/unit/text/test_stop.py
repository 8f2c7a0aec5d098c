"""Stop strings: the text ends before the one that is complete first, the ids with the token that completes it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.router.text import IncrementalDetokenizer, StopCutter, StopMatcher, TextStream

# Few letters, so that stop strings overlap with themselves and with each other.
WORDS = st.text("abé😀", max_size=24)
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=5), max_size=4)


def first_match(text: str, stops: list[str], uncounted: int = 0) -> tuple[int, str] | None:
    """The trivial computation: the shortest prefix of the text that ends with a stop string, the longest such.

    A stop string that is complete within the first ``uncounted`` bytes does not count.
    """
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop) and len(text[:end].encode()) > uncounted]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@st.composite
def pieces_of(draw: st.DrawFn, words: st.SearchStrategy[str]) -> list[bytes]:
    data = draw(words).encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


def chunked(ids: list[int], cuts: set[int]) -> list[list[int]]:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=400, deadline=None)
@given(pieces_of(WORDS), STOPS)
def test_matcher_equals_the_whole_text(pieces: list[bytes], stops: list[str]) -> None:
    text = b"".join(pieces).decode()
    matcher, seen, matched = StopMatcher(stops), "", None
    for character in text:
        new, matched = matcher.feed(character)
        seen += new
        if matched is not None:
            break
    expected = first_match(text, stops)
    if expected is None:
        assert matched is None
        assert seen + matcher.flush() == text
    else:
        assert (seen, matched) == (text[: expected[0]], expected[1])


@settings(max_examples=400, deadline=None)
@given(
    pieces_of(WORDS),
    STOPS,
    st.sets(st.integers(1, 40)),
    st.sets(st.integers(1, 40)),
    st.sampled_from([0, 0, 1, 2, 5, 9]),
    st.booleans(),
)
def test_cutter_and_stream_agree_for_any_rounds(
    pieces: list[bytes], stops: list[str], rounds: set[int], messages: set[int], min_tokens: int, include_stop: bool
) -> None:
    def decode(ids: list[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")

    ids = list(range(len(pieces)))
    text = decode(ids)
    expected = first_match(text, stops, uncounted=sum(map(len, pieces[:min_tokens])))
    cutter = StopCutter(IncrementalDetokenizer(decode), StopMatcher(stops), min_tokens=min_tokens)
    kept: list[int] = []
    matched = None
    for chunk in chunked(ids, rounds):
        count, matched = cutter.feed(chunk)
        kept += chunk[:count]
        if matched is not None:
            break
    stream = TextStream(IncrementalDetokenizer(decode), stops, min_tokens=min_tokens, include_stop=include_stop)
    seen = "".join(stream.feed(chunk) for chunk in chunked(kept, messages)) + stream.finish()
    if expected is None:
        assert (kept, matched, seen) == (ids, None, text)
        return
    start, stop = expected
    assert (matched, seen) == (stop, text[: start + len(stop)] if include_stop else text[:start])
    assert len(kept) > min_tokens
    # The last id kept is the one whose bytes complete the match.
    end = len(text[: start + len(stop)].encode())
    assert sum(map(len, pieces[: len(kept) - 1])) < end <= sum(map(len, pieces[: len(kept)]))


@settings(max_examples=200, deadline=None)
@given(WORDS, STOPS)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, seen = StopMatcher(stops), ""
    for index, character in enumerate(text):
        new, matched = matcher.feed(character)
        seen += new
        if matched is not None:
            return
        held = text[: index + 1][len(seen) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_of_two_stop_strings_the_one_complete_first_wins() -> None:
    assert StopMatcher(["bcd", "c"]).feed("abcd") == ("ab", "c")
    assert StopMatcher(["c", "bc"]).feed("abcd") == ("a", "bc")


def test_a_stop_string_may_overlap_its_own_beginning() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.feed("aa") == ("", None)
    assert matcher.feed("a") == ("a", None)
    assert matcher.feed("b") == ("", "aab")


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["a", ""])


def test_a_stop_string_that_does_not_count_is_text_and_may_begin_the_next() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.feed("aba", counts=False) == ("ab", None)  # its last letter may begin another
    assert matcher.feed("b") == ("", None)
    assert matcher.feed("a") == ("", "aba")
    matcher = StopMatcher(["ab", "b"])
    assert matcher.feed("ab", counts=False) == ("ab", None)
    assert matcher.feed("ca") == ("c", None)
    assert matcher.feed("b") == ("", "ab")


def test_a_last_token_is_spelt_without_a_look_for_stop_strings() -> None:
    stream = TextStream(IncrementalDetokenizer(lambda ids: bytes(ids).decode()), ["xy"])
    assert stream.feed(b"ax") == "a"
    assert stream.finish(b"y") == "xy"
    assert stream.finish(b"z") == ""

"""Incremental text equals the text of the whole, whatever the tokens and however they are grouped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from outrider.router.text import MAX_PARTIAL_TOKENS, MAX_PROMPT_WINDOW, REPLACEMENT, IncrementalDetokenizer

# Characters of 1 to 4 bytes, with joiners and combining marks among them.
TEXT = st.text(
    st.one_of(
        st.sampled_from("ab .\néß€한語😀👩\u200d\u0301\u00a0"),
        st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT),
    ),
    max_size=30,
)


class ByteVocabulary:
    """Byte-level BPE in miniature: token ``i`` stands for some bytes; tokens are spelt as their joined UTF-8."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)
        self.longest_call = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.longest_call = max(self.longest_call, len(ids))
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


@st.composite
def split_bytes(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> list[bytes]:
    data = draw(source)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=len(data))))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


def run(detokenizer: IncrementalDetokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(split_bytes(TEXT.map(str.encode)))
def test_valid_text_comes_out_whole_and_never_with_a_replacement(pieces: list[bytes]) -> None:
    vocabulary = ByteVocabulary(pieces)
    emitted = run(IncrementalDetokenizer(vocabulary.decode), range(len(pieces)))
    assert "".join(emitted) == b"".join(pieces).decode()
    assert REPLACEMENT not in "".join(emitted)


@settings(max_examples=300, deadline=None)
@given(split_bytes(TEXT.map(str.encode)))
def test_text_is_emitted_as_soon_as_its_characters_are_complete(pieces: list[bytes]) -> None:
    vocabulary = ByteVocabulary(pieces)
    detokenizer = IncrementalDetokenizer(vocabulary.decode)
    seen, data = "", b""
    for token, piece in enumerate(pieces):
        seen += detokenizer.push(token)
        data += piece
        assert seen == data.decode("utf-8", "ignore")


@settings(max_examples=300, deadline=None)
@given(
    split_bytes(
        st.one_of(
            st.binary(max_size=40), st.lists(st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0", b"a"])).map(b"".join)
        )
    )
)
@example([b"\xe2"] * 12)
@example([b"\x80"] * 12 + [b"a"])
def test_invalid_bytes_are_spelt_as_the_whole_is(pieces: list[bytes]) -> None:
    vocabulary = ByteVocabulary(pieces)
    emitted = run(IncrementalDetokenizer(vocabulary.decode), range(len(pieces)))
    assert "".join(emitted) == b"".join(pieces).decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(split_bytes(TEXT.map(str.encode)), split_bytes(TEXT.map(str.encode)))
def test_output_continues_the_prompt(prompt: list[bytes], output: list[bytes]) -> None:
    vocabulary = ByteVocabulary(prompt + output)
    detokenizer = IncrementalDetokenizer(vocabulary.decode, prompt=range(len(prompt)))
    ids = range(len(prompt), len(prompt) + len(output))
    assert "".join(run(detokenizer, ids)) == b"".join(output).decode()


@settings(max_examples=300, deadline=None)
@given(split_bytes(TEXT.filter(bool).map(str.encode)), st.data())
def test_a_character_split_between_prompt_and_output_belongs_to_the_output(
    pieces: list[bytes], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(pieces) - 1))
    vocabulary = ByteVocabulary(pieces)
    emitted = run(IncrementalDetokenizer(vocabulary.decode, prompt=range(cut)), range(cut, len(pieces)))
    complete = b"".join(pieces[:cut]).decode("utf-8", "ignore")
    assert "".join(emitted) == b"".join(pieces).decode()[len(complete) :]


@pytest.mark.parametrize("end", [b"a", b"", b"\x82a"])
def test_a_character_that_the_prompt_left_broken_is_not_repeated(end: bytes) -> None:
    vocabulary = ByteVocabulary([b"x", b"\xe2", end])
    detokenizer = IncrementalDetokenizer(vocabulary.decode, prompt=[0, 1])
    assert "".join(run(detokenizer, [2])) == ("a" if end else "")


@pytest.mark.parametrize("piece", [b"a", b"\xe2", b"\x82\xac\xe2", b"\x80", "é".encode()])
def test_the_cost_of_a_token_does_not_grow(piece: bytes) -> None:
    vocabulary = ByteVocabulary([piece])
    detokenizer = IncrementalDetokenizer(vocabulary.decode, prompt=[0] * 500)
    vocabulary.longest_call = 0
    for _ in range(500):
        detokenizer.push(0)
    assert 0 < vocabulary.longest_call <= MAX_PROMPT_WINDOW + MAX_PARTIAL_TOKENS + 1


SPIECE = ["▁", "▁Hello", "▁wor", "ld", "▁a", "b", "▁▁", "é", "!", "<s>"]


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama's decoder: spaces are U+2581, unknown characters fall back to byte tokens, one leading space is dropped."""
    vocab = {token: index for index, token in enumerate(SPIECE)}
    vocab |= {f"<0x{byte:02X}>": len(SPIECE) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@st.composite
def sentencepiece_ids(draw: st.DrawFn) -> list[int]:
    parts = draw(st.lists(st.one_of(st.integers(0, len(SPIECE) - 2), st.sampled_from(["€", "😀", "é"])), max_size=14))
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [len(SPIECE) + byte for byte in part.encode()]
    return ids


@settings(max_examples=300, deadline=None)
@given(sentencepiece_ids(), sentencepiece_ids())
def test_sentencepiece_spaces_and_byte_fallback(prompt: list[int], output: list[int]) -> None:
    tokenizer = sentencepiece_tokenizer()
    whole, before = tokenizer.decode(prompt + output), tokenizer.decode(prompt)
    detokenizer = IncrementalDetokenizer(tokenizer.decode, prompt=prompt)
    assert "".join(run(detokenizer, output)) == whole[len(before) :]


def test_special_tokens_have_no_text_and_do_not_eat_the_space_after_them() -> None:
    tokenizer = sentencepiece_tokenizer()
    special = SPIECE.index("<s>")
    ids = [SPIECE.index("▁Hello"), special, special, SPIECE.index("▁wor"), SPIECE.index("ld")]
    assert "".join(run(IncrementalDetokenizer(tokenizer.decode, skip={special}), ids)) == "Hello world"

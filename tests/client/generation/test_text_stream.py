"""Text from tokens as they come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.client.generation.text_stream import REPLACEMENT, TextStream
from shmsched.errors import InvalidRequest
from shmsched.steps import Tokens

Decode = Callable[[Tokens], str]

BOS = 256
SPACE = 257


def _python(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _one_for_each_byte(data: bytes) -> str:
    """As SentencePiece does: each byte that is no part of a character is one U+FFFD."""
    return "".join(c if c != "\udc80" else REPLACEMENT for c in _fold(data.decode("utf-8", errors="surrogateescape")))


def _fold(text: str) -> str:
    return "".join("\udc80" if "\udc80" <= c <= "\udcff" else c for c in text)


def decoder(to_text: Callable[[bytes], str], pieces: Sequence[bytes], strips_first_space: bool = False) -> Decode:
    """A tokenizer's ``decode`` where token i is ``pieces[i]``; tokens without a piece are silent, as control tokens."""

    def decode(tokens: Tokens) -> str:
        text = to_text(b"".join(pieces[int(t)] for t in tokens if int(t) < len(pieces)))
        return text[1:] if strips_first_space and text.startswith(" ") else text

    return decode


decoders = st.sampled_from([_python, _one_for_each_byte])


@given(st.text(), st.data(), decoders)
def test_increments_join_to_the_text_and_never_split_a_character(
    text: str, data: st.DataObject, to_text: Callable[[bytes], str]
) -> None:
    encoded = text.encode(errors="ignore")
    text = encoded.decode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)))) | {0, len(encoded)})
    pieces = [encoded[a:b] for a, b in itertools.pairwise(cuts)]
    stream = TextStream(decoder(to_text, pieces))
    increments = []
    for i in range(len(pieces)):
        increments.append(stream.push(i))
        assert text.startswith("".join(increments))
        # What is complete is not held back, but for U+FFFD itself, which looks like a part of a character.
        complete = _complete(encoded[: cuts[i + 1]])
        assert len("".join(increments)) >= len(complete.rstrip(REPLACEMENT))
    assert "".join(increments) + stream.finish() == text


def _complete(data: bytes) -> str:
    return data.decode(errors="ignore")


@given(st.lists(st.binary(max_size=4), max_size=30), decoders)
def test_bytes_that_are_no_text_come_out_as_the_whole_decodes(
    pieces: list[bytes], to_text: Callable[[bytes], str]
) -> None:
    decode = decoder(to_text, pieces)
    stream = TextStream(decode)
    text = "".join(stream.push(i) for i in range(len(pieces))) + stream.finish()
    assert text == decode(range(len(pieces)))


@given(st.lists(st.sampled_from([b" ", b" a", b"b", "é".encode(), b"\xc3", b"\xa9", b""]), max_size=20), st.booleans())
def test_the_space_before_the_first_word_after_a_prompt_is_kept(pieces: list[bytes], control: bool) -> None:
    """Some tokenizers take away the first space of what they decode."""
    pieces = [b"prompt", *pieces]
    context = [0] if not control else [0, len(pieces)]
    decode = decoder(_one_for_each_byte, pieces, strips_first_space=True)
    stream = TextStream(decode, context)
    text = "".join(stream.push(i) for i in range(1, len(pieces))) + stream.finish()
    assert "prompt" + text == decode(range(len(pieces)))


divided_texts = st.lists(
    st.sampled_from([b"a", b" ", b" b", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99", b"\x82", b"\xff", b"", b"\xa9c\xc3"])
)


@given(divided_texts, st.lists(st.integers(0, 30), max_size=5), decoders, st.booleans())
def test_parts_that_go_on_join_to_what_one_stream_gives(
    pieces: list[bytes], cuts: list[int], to_text: Callable[[bytes], str], strips: bool
) -> None:
    """Wherever it is cut: what a part holds back comes with the next, and what it gave does not come again."""
    decode = decoder(to_text, [b"prompt", *pieces], strips)
    whole = TextStream(decode, [0])
    expected = "".join(whole.push(i) for i in range(1, len(pieces) + 1))
    parts, goes_on_with = "", None
    ends = sorted({1, len(pieces) + 1, *(min(cut, len(pieces)) + 1 for cut in cuts)})
    for a, b in itertools.pairwise(ends):
        stream = TextStream(decode, range(a), goes_on_with)
        parts += "".join(stream.push(i) for i in range(a, b))
        goes_on_with = ""
    assert parts == expected
    if len(ends) > 1:
        assert parts + stream.finish() == expected + whole.finish()


@given(st.text(st.sampled_from("aé🙂日"), min_size=1, max_size=8), st.data(), decoders)
def test_a_character_that_the_context_ends_within_comes_whole(
    text: str, data: st.DataObject, to_text: Callable[[bytes], str]
) -> None:
    encoded = text.encode()
    at = data.draw(st.integers(1, len(encoded)))
    stream = TextStream(decoder(to_text, [bytes([b]) for b in encoded]), range(at))
    given_text = "".join(stream.push(i) for i in range(at, len(encoded))) + stream.finish()
    assert encoded[:at].decode(errors="ignore") + given_text == text


def test_the_window_stays_small() -> None:
    longest = 0

    def decode(tokens: Tokens) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return bytes(tokens).decode("utf-8", errors="replace")

    stream = TextStream(decode)
    text = "".join(stream.push(b) for b in "naïve 日本 text 🙂".encode() * 100)
    assert text == "naïve 日本 text 🙂" * 100
    assert longest <= 8


@pytest.mark.parametrize("tokens", [[], [0xF0], [0xF0, 0x9F, 0x99]])
def test_finish_gives_what_is_left_once(tokens: list[int]) -> None:
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    assert "".join(stream.push(t) for t in tokens) == ""
    assert stream.finish() == (REPLACEMENT if tokens else "")
    assert stream.finish() == ""


def test_what_a_tokenizer_returned_is_said() -> None:
    stream = TextStream(lambda tokens: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidRequest, match="tokenizer returned None for tokens; a text"):
        stream.push(1)

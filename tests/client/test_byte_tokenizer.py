"""The tokenizer ``bytes``: any text comes back, whatever a model says can be shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmsched.client.byte_tokenizer import load
from shmsched.client.generation.text_stream import TextStream


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = load("")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(0 <= token < 256 for token in tokenizer.encode(text))


@given(st.lists(st.integers(0, 1000)))
def test_any_tokens_can_be_shown_and_streamed(tokens: list[int]) -> None:
    tokenizer = load("")
    stream = TextStream(tokenizer.decode)
    assert "".join([*map(stream.push, tokens), stream.finish()]) == tokenizer.decode(tokens)

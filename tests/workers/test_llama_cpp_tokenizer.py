"""llama.cpp's tokenizer: one of SentencePiece's kind, which the gguf tokenizer reads, too, and one of bytes and merges."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCAB, write_model

from shmsched.client.generation.text_stream import TextStream
from shmsched.errors import EngineStartError
from shmsched.workers.gguf import tokenizer as gguf_tokenizer

pytest.importorskip("llama_cpp", reason="needs the llama extra: pip install 'shmsched[llama]'")

from shmsched.workers.llama_cpp.tokenizer import Tokenizer, load

SPACE_MARK = "\u2581"
TEXT = st.text(st.characters(exclude_characters=SPACE_MARK, codec="utf-8"))
WORDS = st.lists(st.sampled_from(["Hello", " world", "é", "日本", "😀", "\n\n", "   ", "<eos>", "<b>", " .", "a"])).map(
    "".join
)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vocabulary") / "tiny.gguf", n_layers=1)


@pytest.fixture(scope="module")
def pieces(sentencepiece_file: Path) -> Tokenizer:
    return load(str(sentencepiece_file))


def byte_names() -> dict[int, str]:
    """GPT-2's way to write each byte as a printable character."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of all bytes and a few merges, which the gguf tokenizer refuses."""
    path = tmp_path_factory.mktemp("merges") / "gpt2.gguf"
    space = byte_names()[0x20]
    tokens = [*byte_names().values(), "he", "ll", "hell", "hello", f"{space}w", "<|end|>"]
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", f"{space} w"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load(str(path))


@given(TEXT | WORDS)
def test_text_comes_back(pieces: Tokenizer, merges: Tokenizer, text: str) -> None:
    for tokenizer in (pieces, merges):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(WORDS)
def test_it_says_what_the_gguf_tokenizer_says(pieces: Tokenizer, sentencepiece_file: Path, text: str) -> None:
    other = gguf_tokenizer.load(str(sentencepiece_file))
    assert pieces.encode(text, bos=True) == other.encode(text, bos=True)
    assert pieces.decode(other.encode(text)) == other.decode(other.encode(text))


@given(TEXT | WORDS)
def test_text_is_streamed_as_it_is(pieces: Tokenizer, merges: Tokenizer, text: str) -> None:
    for tokenizer in (pieces, merges):
        stream = TextStream(tokenizer.decode)
        assert "".join(stream.push(token) for token in tokenizer.encode(text)) + stream.finish() == text


def test_merges_are_made(merges: Tokenizer) -> None:
    assert merges.encode("hello world") == [259, 260, *(list(byte_names()).index(ord(c)) for c in "orld")]


def test_an_incomplete_character_is_the_replacement(pieces: Tokenizer, merges: Tokenizer) -> None:
    for tokenizer in (pieces, merges):
        tokens = tokenizer.encode("x😀")
        assert [tokenizer.decode(tokens[:n]) for n in range(1, 6)] == ["x", "x\ufffd", "x\ufffd", "x\ufffd", "x😀"]


def test_the_beginning_of_a_text_only_where_the_model_wants_one(pieces: Tokenizer, merges: Tokenizer) -> None:
    assert pieces.encode("", bos=True) == [2]
    assert merges.encode("", bos=True) == []


def test_control_tokens_are_silent_and_stop(pieces: Tokenizer, merges: Tokenizer) -> None:
    assert pieces.stop_tokens == (1, 5)
    assert merges.stop_tokens == (merges.vocab_size - 1,)
    assert pieces.decode([2, *pieces.encode("Hello"), 5, 1]) == "Hello"
    assert merges.decode([*merges.encode("hello"), merges.vocab_size - 1]) == "hello"


def test_what_is_no_token_or_no_file_is_refused(pieces: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"token {len(VOCAB)} is outside the vocabulary of {len(VOCAB)}"):
        pieces.decode([len(VOCAB)])
    with pytest.raises(EngineStartError, match="there is no GGUF file"):
        load(str(tmp_path / "none.gguf"))

"""The tokenizer from a GGUF file's vocabulary, on a tiny one."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import VOCAB, write_vocabulary

from shmsched.client.generation.text_stream import TextStream
from shmsched.workers.gguf.file import GgufError
from shmsched.workers.gguf.tokenizer import Tokenizer, load

SPACE_MARK = "\u2581"
TEXT = st.text(st.characters(exclude_characters=SPACE_MARK, codec="utf-8"))
PARTS = st.lists(st.sampled_from([*VOCAB, " ", "\t", "\r\n", "日本", "😀", "é", "\0", "\u00a0", "\ufeff"]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "vocabulary.gguf"
    write(path)
    return load(str(path))


def write(path: Path, **changes: object) -> None:
    writer = gguf.GGUFWriter(path, "gemma3")
    write_vocabulary(writer)
    for key, value in changes.items():
        writer.kv_data[0][f"tokenizer.ggml.{key}"].value = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pieces(*names: str) -> list[int]:
    return [VOCAB.index(name) for name in names]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", ["Hello"]),
        ("Hello world", ["Hello", "▁world"]),
        ("Hello  world", ["Hello", "  ", "w", "or", "ld"]),  # a run of spaces is a user-defined piece
        ("     w", ["   ", "  ", "w"]),
        (" w", ["▁w"]),
        ("w", ["w"]),  # no space is put in front
        ("a\n\nb\n", ["a", "\n\n", "b", "\n"]),
        ("He<b>llo", ["He", "<b>", "llo"]),
        ("é日", ["é", "日"]),
        ("ü", ["<0xC3>", "<0xBC>"]),
        ("😀", ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]),
        ("", []),
    ],
)
def test_pieces(tokenizer: Tokenizer, text: str, expected: list[str]) -> None:
    assert tokenizer.encode(text) == pieces(*expected)


def test_bos_is_put_in_front_when_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello", bos=True) == pieces("<bos>", "Hello")
    assert tokenizer.encode("", bos=True) == pieces("<bos>")


def test_names_of_control_pieces_are_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<bos>a<end_of_turn>")
    assert not set(tokens) & set(pieces("<bos>", "<end_of_turn>"))
    assert tokenizer.decode(tokens) == "<bos>a<end_of_turn>"


def test_decode_leaves_control_pieces_out(tokenizer: Tokenizer) -> None:
    tokens = pieces("<bos>", "<start_of_turn>", "Hello", "<unk>", "▁world", "<end_of_turn>", "<eos>", "<pad>")
    assert tokenizer.decode(tokens) == "Hello world"


def test_decode_joins_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(pieces("a", "<0xC3>", "<0xBC>", "b")) == "aüb"
    assert tokenizer.decode(pieces("a", "<0xC3>", "b")) == "a\ufffdb"


def test_decode_takes_arrays(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(np.asarray(pieces("Hello", "▁w"))) == "Hello w"


@pytest.mark.parametrize("token", [-1, len(VOCAB)])
def test_tokens_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of {len(VOCAB)}"):
        tokenizer.decode([token])


def test_stop_tokens_are_end_of_text_and_of_turn(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_tokens == tuple(pieces("<eos>", "<end_of_turn>"))


@settings(deadline=None)
@given(TEXT | PARTS.map("".join).map(lambda text: text.replace(SPACE_MARK, "")))
@example("  leading")
@example(" a\n\n\n b\t\t c   d    ")
@example("日本語 😀\r\n")
@example("<0x41><unk>")
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, len(VOCAB) - 1)))
def test_any_tokens_decode(tokenizer: Tokenizer, tokens: list[int]) -> None:
    tokenizer.decode(tokens).encode()


@given(st.text(st.sampled_from("a b日é🙂"), max_size=12), st.data())
def test_a_text_that_is_cut_between_any_tokens_goes_on_as_one(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    """Characters that the vocabulary lacks are bytes, each of them a token."""
    tokens = tokenizer.encode(text, bos=True)
    cut = data.draw(st.integers(1, len(tokens)))
    first = TextStream(tokenizer.decode, tokens[:1])
    parts = [first.push(token) for token in tokens[1:cut]]
    second = TextStream(tokenizer.decode, tokens[:cut], "" if cut > 1 else None)
    parts += [second.push(token) for token in tokens[cut:]]
    assert "".join(parts) == tokenizer.decode(tokens)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "bpe.gguf", model="gpt2")
    with pytest.raises(GgufError, match="its tokenizer is 'gpt2'"):
        load(str(tmp_path / "bpe.gguf"))


def test_a_vocabulary_without_scores_for_all_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "short.gguf", scores=[0.0] * 7)
    with pytest.raises(GgufError, match=f"{len(VOCAB)} pieces, {len(VOCAB)} types and 7 scores"):
        load(str(tmp_path / "short.gguf"))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(GgufError, match=r"there is no GGUF file /nowhere/m\.gguf"):
        load("/nowhere/m.gguf")

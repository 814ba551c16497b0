"""Echo's answers are those of its definition, however the tokens were batched. Stress and fault tests rest on it."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.engine import BatchView, Engine, StepRow
from shmsched.errors import Unsupported
from shmsched.params import SamplingParams
from shmsched.workers.echo import Echo, advance, answer

VOCAB = 500
Step = tuple[int, int, list[int]]
"""slot, position, tokens"""


def definition(tokens: list[int]) -> list[int]:
    """The issue's words: h = 0; for each t, h = (6364136223846793005 h + t + 1) mod 2**64; the answer is (h >> 33) % vocab."""
    h, answers = 0, []
    for t in tokens:
        h = (6364136223846793005 * h + t + 1) % 2**64
        answers.append((h >> 33) % VOCAB)
    return answers


def run(echo: Echo, steps: list[Step], sampling: SamplingParams | None = None) -> BatchView:
    """All rows of all steps."""
    flat = [t for _, _, tokens in steps for t in tokens]
    starts = np.cumsum([0, *[len(tokens) for _, _, tokens in steps]]).tolist()
    view = BatchView(
        np.array(flat, np.int32),
        np.concatenate([np.arange(p, p + len(tokens), dtype=np.int32) for _, p, tokens in steps]),
        [StepRow(slot, start, len(tokens)) for (slot, _, tokens), start in zip(steps, starts, strict=False)],
        np.arange(len(flat), dtype=np.int32),
        [sampling] * len(flat),
        [np.full(VOCAB, np.nan, np.float32) if sampling is None else None for _ in flat],
        VOCAB,
    )
    echo.forward(view)
    assert view.finish() == []
    return view


def test_the_known_answers() -> None:
    """Fixed numbers, so that a change of both definitions at once would show."""
    assert definition([0]) == [0]
    assert advance(0, [7, 7, 42]) == (((8 * 6364136223846793005 + 8) * 6364136223846793005) + 43) % 2**64
    assert [answer(advance(0, range(n)), 32000) for n in range(1, 5)] == [0, 18966, 6014, 23969]


TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(0, 2**32))
def test_answers_do_not_depend_on_how_tokens_were_batched(sessions: list[list[int]], seed: int) -> None:
    random = Random(seed)
    echo = Echo(vocab=VOCAB)
    got: list[list[int]] = [[] for _ in sessions]
    for slot in range(len(sessions)):
        echo.open_session(slot, b"")
    while any(len(g) < len(s) for g, s in zip(got, sessions, strict=True)):
        steps = []
        for slot, tokens in enumerate(sessions):
            left = tokens[len(got[slot]) :]
            if left and (n := random.randint(0, len(left))):
                steps.append((slot, len(got[slot]), left[:n]))
        if not steps:
            continue
        ids = iter(run(echo, steps, SamplingParams()).token_ids.tolist())
        for slot, _, tokens in steps:
            got[slot] += [next(ids) for _ in tokens]
    assert got == [definition(tokens) for tokens in sessions]


@given(TOKENS, TOKENS, st.data())
def test_rewinding_to_any_earlier_position(before: list[int], after: list[int], data: st.DataObject) -> None:
    echo = Echo(vocab=VOCAB)
    echo.open_session(3, b"")
    run(echo, [(3, 0, before)])
    length = data.draw(st.integers(0, len(before)))
    echo.rewind(3, length)
    ids = run(echo, [(3, length, after)], SamplingParams()).token_ids.tolist()
    assert ids == definition(before[:length] + after)[length:]


@given(TOKENS, TOKENS, TOKENS, st.data())
def test_a_fork_and_its_parent_are_independent(
    before: list[int], after: list[int], other: list[int], data: st.DataObject
) -> None:
    echo = Echo(vocab=VOCAB)
    echo.open_session(0, b"")
    run(echo, [(0, 0, before)])
    length = data.draw(st.integers(0, len(before)))
    echo.fork_session(0, 7, length)
    ids = run(echo, [(0, len(before), after), (7, length, other)], SamplingParams()).token_ids.tolist()
    assert ids == definition(before + after)[len(before) :] + definition(before[:length] + other)[length:]


def test_an_engine_that_does_not_say_how_cannot_fork() -> None:
    with pytest.raises(Unsupported, match="Engine cannot fork a session"):
        Engine().fork_session(0, 1, 0)


@given(TOKENS)
def test_a_raw_row_is_the_pattern_with_the_answer_on_top(tokens: list[int]) -> None:
    echo = Echo(vocab=VOCAB)
    echo.open_session(0, b"")
    view = run(echo, [(0, 0, tokens)])
    for row, token in zip(view._raw_rows, definition(tokens), strict=True):
        assert row is not None
        expected = [float((j * 40503) & 0xFFFF) for j in range(VOCAB)]
        expected[token] = 131072.0
        assert row.tolist() == expected
        assert int(row.argmax()) == token


def test_a_slot_that_is_used_again_begins_anew() -> None:
    echo = Echo(vocab=VOCAB)
    echo.open_session(0, b"")
    run(echo, [(0, 0, [1, 2, 3])])
    echo.close_session(0)
    echo.open_session(0, b"")
    assert run(echo, [(0, 0, [4])], SamplingParams()).token_ids.tolist() == definition([4])


def test_what_it_costs_is_slept() -> None:
    echo = Echo(vocab=VOCAB, step_us=3000, token_us=1000)
    echo.open_session(0, b"")
    began, cpu = time.monotonic(), time.process_time()
    run(echo, [(0, 0, [1] * 7)])
    assert time.monotonic() - began >= 0.010
    assert time.process_time() - cpu < 0.010


def test_its_limits_are_those_that_were_asked_for() -> None:
    info = Echo(vocab=9, max_sessions=2, max_session_tokens=77, model="other").info
    assert (info.vocab_size, info.max_sessions, info.max_session_tokens, info.model) == (9, 2, 77, "other")
    with pytest.raises(ValueError, match="vocab is 0"):
        Echo(vocab=0)

"""Stop texts: the text ends before the first one, wherever tokens divide it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.client.generation.stop_text import TextGate
from shmsched.client.generation.text_stream import TextStream
from shmsched.errors import InvalidRequest
from shmsched.steps import Tokens

texts = st.text(st.sampled_from("abc é🙂"), max_size=20)
stop_texts = st.lists(st.text(st.sampled_from("abc é🙂"), min_size=1, max_size=4), max_size=3)


def gate_of(pieces: list[bytes], stops: list[str]) -> TextGate:
    def decode(tokens: Tokens) -> str:
        return b"".join(pieces[int(t)] for t in tokens).decode(errors="replace")

    return TextGate(TextStream(decode), stops)


def divided(text: str, data: st.DataObject) -> list[bytes]:
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)))) | {0, len(encoded)})
    return [encoded[a:b] for a, b in itertools.pairwise(cuts)]


@given(texts, stop_texts, st.data())
def test_the_text_ends_before_the_first_stop_text_and_tokens_with_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    pieces = divided(text, data)
    gate = gate_of(pieces, stops)
    tokens: list[int] = []
    increments = []
    ends = list(itertools.accumulate(map(len, pieces)))
    i = -1
    for i in range(len(pieces)):
        for piece in gate.push(i):
            tokens.append(piece.token)
            increments.append(piece.text)
            # Whoever has a token has the text up to there.
            assert "".join(increments) == text.encode()[: ends[piece.token]].decode(errors="ignore")
        if gate.stopped:
            break
    else:
        given = gate.finish()
        tokens += [piece.token for piece in given]
        increments += [piece.text for piece in given]
    increments.append(gate.rest)
    # The first that is complete ends it; of those that are complete at once, the one that begins first.
    seen = b"".join(pieces[: i + 1]).decode(errors="ignore")
    found = [seen.find(stop) for stop in stops if stop in seen]
    assert gate.stopped == bool(found)
    assert not any(stop in b"".join(pieces[: max(i, 0)]).decode(errors="ignore") for stop in stops)
    cut = min(found, default=len(text))
    assert "".join(increments) == text[:cut]
    assert tokens == list(range(len(tokens)))
    # Exactly those tokens are given whose text lies wholly before it.
    before = len(text[:cut].encode())
    assert [e for e in ends if e <= before][: len(tokens)] == ends[: len(tokens)]
    if not gate.stopped:
        assert len(tokens) == len(pieces)


def test_what_may_be_a_beginning_is_held_back_and_given_when_it_is_not() -> None:
    gate = gate_of([b"on", b"e EN", b"D", b"ED", b"E", b"ND?"], ["END?"])
    given = [gate.push(i) for i in range(6)]
    assert given == [[(0, "on", "")], [], [], [(1, "e EN", ""), (2, "D", ""), (3, "ED", "")], [], []]
    assert (gate.stopped, gate.rest) == (True, "")


def test_text_before_a_stop_text_within_a_token_is_the_rest() -> None:
    gate = gate_of([b"on", b"e END!"], ["END"])
    assert [gate.push(i) for i in range(2)] == [[(0, "on", "")], []]
    assert (gate.stopped, gate.rest) == (True, "e ")


def test_a_token_that_ends_within_a_character_is_held_back() -> None:
    gate = gate_of([b"\xf0\x9f", b"\x99\x82", b"!"], ["\U0001f642!"])
    assert [gate.push(i) for i in range(3)] == [[], [], []]
    assert (gate.stopped, gate.rest) == (True, "")


@given(texts, stop_texts.filter(bool), st.data())
def test_a_cut_anywhere_changes_nothing(text: str, stops: list[str], data: st.DataObject) -> None:
    """Each part goes on with what the one before held back."""
    pieces = divided(text, data)
    cuts = sorted([0, len(pieces), *data.draw(st.lists(st.integers(0, len(pieces)), max_size=4))])

    def decode(tokens: Tokens) -> str:
        return b"".join(pieces[int(t)] for t in tokens).decode(errors="replace")

    def said(gate: TextGate, tokens: range) -> str:
        given = ""
        for i in tokens:
            given += "".join(piece.text for piece in gate.push(i))
            if gate.stopped:
                return given + gate.rest
        return given

    whole = TextGate(TextStream(decode), stops)
    expected, parts, held, stopped = said(whole, range(len(pieces))), "", "", False
    for a, b in itertools.pairwise(cuts):
        if a < b and not stopped:
            gate = TextGate(TextStream(decode, range(a), held), stops)
            parts += said(gate, range(a, b))
            held = "".join(piece.held for piece in gate.cut())
            stopped = gate.stopped
    assert stopped == whole.stopped
    if stopped:
        assert parts == expected
    else:
        # What came before a cut and is given after it comes with a token: it may be held back for longer.
        assert parts + held == expected + "".join(piece.held for piece in whole.cut())
        assert expected.startswith(parts)


@pytest.mark.parametrize("stops", ["text", [""], ["a", ""], [1], [b"a"]])
def test_stop_texts_that_are_none_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop is .* a sequence of texts"):
        gate_of([], stops)

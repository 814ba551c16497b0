"""Grammars as logits processors: whatever the model would like to say, only what the grammar allows is left."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runner import PlainSession, course_on

from shmsched.client.generation.course import FinishReason
from shmsched.client.generation.effects import Emit
from shmsched.client.generation.grammar import Grammar
from shmsched.client.generation.stepping import processing
from shmsched.client.models import Model
from shmsched.engine.contract import EngineInfo
from shmsched.errors import InvalidRequest, Unsupported
from shmsched.params import SamplingParams
from shmsched.steps import LogitsBlock, Response

STOP = 256
MODEL = Model(
    EngineInfo(
        model="bytes", vocab_size=260, max_sessions=1, max_session_tokens=1000, tokenizer="bytes", stop_tokens=(STOP,)
    ),
    1,
    True,
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ok": {"type": "boolean"},
        "n": {"enum": [1, 22, "日本"]},
    },
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}


def said(grammar: Grammar, seed: int, most: int = 200) -> tuple[str, FinishReason | None]:
    """What a model says that likes any byte as much as any other."""
    rng = np.random.default_rng(seed)
    course = course_on(PlainSession(), [1], most, sampling=SamplingParams(1.0, seed=seed), stop_tokens=[STOP])
    plan = processing(course, grammar)
    effect = plan.send(None)
    try:
        while True:
            if isinstance(effect, Emit):
                effect = plan.send(None)
                continue
            row = rng.normal(0, 1, (1, MODEL.vocab_size)).astype(np.float32)
            effect = plan.send(Response(1, 1, logits=LogitsBlock(row)))
    except StopIteration:
        return bytes(course.given).decode(), course.finish_reason


@given(st.integers(0, 1000))
def test_json_matches_the_schema(seed: int) -> None:
    text, reason = said(Grammar.json_schema(MODEL, SCHEMA), seed)
    assert reason is FinishReason.STOP
    value = json.loads(text)
    assert set(value) == {"name", "ok", "n"}
    assert len(value["name"]) <= 6
    assert value["ok"] in (True, False)
    assert value["n"] in (1, 22, "日本")
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":")) or "\\" in text


def test_a_regular_expression_and_a_context_free_grammar() -> None:
    for seed in range(20):
        text, reason = said(Grammar.regex(MODEL, "[a-c]{2,5}é?"), seed)
        assert re.fullmatch("[a-c]{2,5}é?", text)
        assert reason is FinishReason.STOP
        text, _ = said(Grammar.lark(MODEL, 'start: "(" start ")" | "x"'), seed)
        assert re.fullmatch(r"\(*x\)*", text)
        assert text.count("(") == text.count(")")


def test_the_row_is_copied_once_and_what_is_allowed_is_left_as_it_was() -> None:
    grammar = Grammar.regex(MODEL, "[ab]+")
    row = np.arange(MODEL.vocab_size, dtype=np.float32)
    row.flags.writeable = False
    left = grammar([], row)
    assert left.dtype == np.float32
    assert np.flatnonzero(left > -np.inf).tolist() == [ord("a"), ord("b")]
    assert (left[[ord("a"), ord("b")]] == row[[ord("a"), ord("b")]]).all()
    assert np.flatnonzero(grammar([ord("a")], row) > -np.inf).tolist() == [ord("a"), ord("b"), STOP]


def test_it_serves_one_generation_after_the_other_and_sees_one_begun_again() -> None:
    grammar = Grammar.regex(MODEL, "abc")
    row = np.zeros(MODEL.vocab_size, np.float32)

    def allowed(text: bytes) -> list[int]:
        return np.flatnonzero(grammar(list(text), row) > -np.inf).tolist()

    assert [allowed(b"abc"[:n]) for n in (0, 1, 2, 3)] == [[97], [98], [99], [STOP]]
    assert allowed(b"") == [97]
    assert allowed(b"ab") == [99]
    assert allowed(b"a") == [98]
    with pytest.raises(InvalidRequest, match="the grammar went wrong after 1 token:"):
        allowed(b"ax")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex(MODEL, "(a"), "the grammar cannot be used"),
        (lambda: Grammar.lark(MODEL, "start: nowhere"), "the grammar cannot be used"),
        (lambda: Grammar.json_schema(MODEL, {"type": "nothing"}), "the grammar cannot be used"),
    ],
)
def test_a_grammar_that_is_none_is_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("make", [Grammar.regex, Grammar.lark, Grammar.json_schema])
def test_what_is_no_grammar_at_all_is_named(make: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^(regex|grammar|schema) is .*; a .* is wanted"):
        make(MODEL, {1: object()})  # type: ignore[operator]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    info = EngineInfo(model="m", vocab_size=260, max_sessions=1, max_session_tokens=10, tokenizer="bytes")
    with pytest.raises(Unsupported, match="'m' has no stop token"):
        Grammar.regex(Model(info, 1, True), "a")
    info = EngineInfo(model="m", vocab_size=260, max_sessions=1, max_session_tokens=10)
    with pytest.raises(Unsupported, match="'m' has no tokenizer"):
        Grammar.regex(Model(info, 1, True), "a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unsupported, match=r"pip install 'shmsched\[grammar\]'"):
        Grammar.regex(MODEL, "a")

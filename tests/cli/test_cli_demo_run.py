"""What the demo measures, and how it shows texts piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.cli.demo_run import Batches, BatchSeen, Rate, Stream, rate_lately, rate_while_all_decode
from shmsched.cli.demo_view import PlainView, one_line, summed_up
from shmsched.cli.printable import printable


def stream(*times: float) -> Stream:
    return Stream(1, 1, "p", times=list(times))


def test_only_the_time_in_which_all_decode_counts() -> None:
    assert rate_while_all_decode([stream(0, 1, 2, 3, 4, 9), stream(2, 3, 4)]) == Rate(4, 2.0)
    assert rate_while_all_decode([stream(1, 2, 3)]) == Rate(2, 2.0)


@pytest.mark.parametrize("streams", [[stream(0, 1), stream(1, 2)], [stream(0, 1), stream()], [stream(5)]])
def test_sessions_that_never_decoded_together_have_no_rate(streams: list[Stream]) -> None:
    assert rate_while_all_decode(streams) is None


def test_the_rate_lately_begins_with_the_first_token() -> None:
    assert rate_lately([stream()], 5.0) == 0.0
    assert rate_lately([stream(9.0, 9.5, 10.0)], 10.0) == 2.0
    assert rate_lately([stream(*range(100))], 99.0) == 1.0


def status(*numbers: int, engine: int = 1) -> dict[str, Any]:
    batches = [
        {"number": n, "decodes": 1, "prefill_chunks": 0, "tokens": 1, "seconds": 0.1, "ended": 0.0} for n in numbers
    ]
    return {"engines": [{"engine": engine, "recent_batches": batches}]}


def test_each_batch_is_seen_once() -> None:
    batches = Batches()
    batches.begin(status(1, 2))
    assert batches.seen == []
    batches.take(status(2, 3))
    batches.take(status(2, 3, 4))
    batches.take(status(1, engine=2))
    assert [batch.number for batch in batches.seen] == [3, 4, 1]


def test_batches_in_words() -> None:
    assert summed_up([BatchSeen(3, 1, 1, 10, 0.5)]) == "[batch 3] 1 decode, 1 prefill chunk (9 tokens), 500 ms"
    assert summed_up([BatchSeen(3, 1, 0, 1, 0.1), BatchSeen(4, 2, 0, 2, 0.3)]) == (
        "[batches 3 to 4] 1.5 decodes each, 200 ms each"
    )


@given(st.lists(st.text(alphabet="ab \n", max_size=60), max_size=20))
def test_a_log_has_every_word_of_a_text_in_order(increments: list[str]) -> None:
    said: list[str] = []
    view = PlainView()
    view.say = said.append  # type: ignore[method-assign]
    one = stream()
    view.begin("title", [one], Batches())
    del said[:]
    for increment in increments:
        one.take({"text": increment, "ended": False})
        view.update()
    view.end()
    lines = [line.removeprefix("[client 1 session 1]") for line in said]
    assert "".join(lines).replace(" ", "") == one_line(one.text).replace(" ", "")
    assert all(len(line) <= PlainView.LINE + 1 for line in lines)
    assert all(line.strip() for line in lines)


def test_what_a_terminal_would_obey_is_made_visible() -> None:
    assert printable("a\x1b[31m\r\tb\n\x9b") == "a\ufffd[31m\ufffd\tb\n\ufffd"

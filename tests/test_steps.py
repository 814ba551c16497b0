"""What a step may ask for: values out of range are refused where they are written."""

from __future__ import annotations

from typing import Any

import pytest

from shmsched.dataplane.layouts import SAMPLING
from shmsched.errors import InvalidRequest
from shmsched.params import OutputRows, RequestParams, SamplingParams
from shmsched.steps import Request
from shmsched.wire.codec import pack, unpack
from shmsched.wire.frames import StepDescriptor, Submit

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1},
        {"temperature": 100.0},
        {"top_p": 1},
        {"top_p": 1e-6},
        {"top_k": 0},
        {"top_k": 2**31 - 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"seed": None},
    ],
    ids=str,
)
def test_what_is_taken_travels(good: dict[str, Any]) -> None:
    p = SamplingParams(**good)
    step = StepDescriptor(1, 1, 1, 0, 1, 1, SAMPLING.pack(p.top_k, p.temperature, p.top_p, p.seed or 0), 0)
    (again,) = unpack(pack(Submit(0, 0, 0, 0, [step]))).steps
    top_k, temperature, top_p, seed = SAMPLING.unpack(again.sampling)
    assert (top_k, seed) == (p.top_k, p.seed or 0)
    assert temperature == pytest.approx(p.temperature)
    assert top_p == pytest.approx(p.top_p)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be a number from 0 to 1e\+06"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be over 0"),
        ({"top_p": -0.5}, r"top_p is -0\.5"),
        ({"top_p": 1.01}, r"top_p is 1\.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number"),
        ({"top_k": 2**31}, "top_k is 2147483648"),
        ({"top_k": 2.5}, r"top_k is 2\.5"),
        ({"top_k": True}, "top_k is True"),
        ({"seed": -1}, "seed is -1; it must be from 0"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**bad)
    with pytest.raises(ValueError, match=message):
        SamplingParams(**bad)


@pytest.mark.parametrize("bad", [{"temperature": 1e39}, {"top_k": 5.0}, {"seed": 1.5}], ids=str)
def test_what_no_frame_can_carry_is_refused(bad: dict[str, Any]) -> None:
    """Else it would show when the step is sent, with its tokens in the ring already."""
    with pytest.raises(InvalidRequest, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize(("rows", "n"), [(OutputRows.NONE, 0), (OutputRows.LAST, 1), (OutputRows.ALL, 7)])
def test_how_many_rows(rows: OutputRows, n: int) -> None:
    assert rows.count(7) == n


def test_defaults_are_greedy_last_row_from_the_beginning() -> None:
    assert Request(1, 10, [7]).params == RequestParams(0, SamplingParams(0.0, 1.0, 0, None), OutputRows.LAST)

"""What is taken as tokens, and what is refused at the call, with the value in the message."""

from __future__ import annotations

import array
from collections import UserList
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.dataplane.tokens import as_tokens
from shmsched.errors import InvalidRequest

VOCAB = 300
INTEGER_TYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8"]


@pytest.mark.parametrize("dtype", INTEGER_TYPES)
def test_every_integer_type(dtype: str) -> None:
    tokens = as_tokens(np.array([0, 5, 127], dtype), VOCAB)
    assert tokens.dtype == np.int32
    assert tokens.dtype.isnative
    assert tokens.tolist() == [0, 5, 127]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        UserList,
        lambda v: [np.int64(t) for t in v],
        lambda v: [np.uint8(t) for t in v],
        lambda v: array.array("l", v),
        lambda v: memoryview(bytes(v)),
        bytearray,
        lambda v: np.array(v, object),
        lambda v: np.array(v)[::-1][::-1],
        lambda v: np.repeat(v, 2)[::2],
    ],
)
def test_every_flat_sequence_of_integers(make: Callable[[list[int]], Any]) -> None:
    tokens = as_tokens(make([3, 0, 255]), VOCAB)
    assert (tokens.dtype, tokens.tolist()) == (np.int32, [3, 0, 255])


def test_a_range() -> None:
    assert as_tokens(range(2, 8, 2), VOCAB).tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "tokens are empty"),
        (np.empty(0, np.int32), "tokens are empty"),
        ([1.0], r"token 1\.0 is not an integer"),
        ([1, 2.5, 3], r"token 2\.5 is not an integer"),
        ([1, 2.0], r"token 2\.0 is not an integer"),
        (np.array([7.0, 8.0]), r"token 7\.0 is not an integer \(tokens of type float64\)"),
        (np.array([1.5], np.float16), r"token 1\.5 is not an integer"),
        ([float("nan")], "token nan is not an integer"),
        ([1 + 0j], r"token \(1\+0j\) is not an integer"),
        ([True, False], "token True is not an integer"),
        (np.array([False]), "token False is not an integer"),
        (np.array([1, True], object), "token True is not an integer"),
        (["1"], "token '1' is not an integer"),
        ([1, "two"], "token 'two' is not an integer"),
        ([b"1"], "token b'1' is not an integer"),
        ([1, None], "token None is not an integer"),
        ([None], "token None is not an integer"),
        ([1, None, 2**70], "token None is not an integer"),
        ("123", "a sequence of integers is wanted"),
        (b"123", "a sequence of integers is wanted"),
        (5, "a sequence of integers is wanted"),
        (None, "a sequence of integers is wanted"),
        ({1, 2}, "a sequence of integers is wanted"),
        ({1: 2}, "a sequence of integers is wanted"),
        ((t for t in (1, 2)), "a sequence of integers is wanted"),
        ([[1, 2]], r"tokens have shape \(1, 2\)"),
        (np.zeros((3, 1), np.int32), r"tokens have shape \(3, 1\)"),
        ([[1], [2, 3]], "no flat sequence of integers"),
        ([1, [2]], "no flat sequence of integers"),
        ([-1], "token -1 is outside the vocabulary; it must be from 0 to 299"),
        ([5, VOCAB], "token 300 is outside the vocabulary"),
        ([-7, 5000], "token -7 is outside"),
        (np.array([2**64 - 1], np.uint64), "token 18446744073709551615 is outside"),
        (np.array([-(2**63)], np.int64), "token -9223372036854775808 is outside"),
        ([2**63, -1], "token -1 is outside"),
        ([1, 2**70], "token 1180591620717411303424 is outside"),
        ([-(2**70)], "token -1180591620717411303424 is outside"),
        ([2**32], "token 4294967296 is outside"),
        (np.array(["2020-01-01"], "M8[D]"), "is not an integer"),
    ],
    ids=lambda v: repr(v).partition(" at 0x")[0][:40],
)
def test_everything_else_is_refused_and_named(tokens: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        as_tokens(tokens, VOCAB)


def test_a_refusal_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="token -1"):
        as_tokens([-1], VOCAB)


@given(st.lists(st.integers(-(2**66), 2**66) | st.integers(-2, VOCAB + 1), min_size=1, max_size=6))
def test_exactly_the_vocabulary(tokens: list[int]) -> None:
    if all(0 <= t < VOCAB for t in tokens):
        assert as_tokens(tokens, VOCAB).tolist() == tokens
    else:
        with pytest.raises(InvalidRequest, match="outside the vocabulary") as e:
            as_tokens(tokens, VOCAB)
        assert any(f"token {t} is" in str(e.value) for t in tokens if not 0 <= t < VOCAB)


def test_the_largest_vocabulary() -> None:
    assert as_tokens([2**31 - 2], 2**31 - 1).tolist() == [2**31 - 2]

"""Where a fuzzer's decisions come from: bytes that a coverage-guided fuzzer mutates, or what hypothesis draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


_TRUTHS = 40


class Exhausted(Exception):
    """No decision is left."""


class Choices(Protocol):
    def below(self, n: int) -> int:
        """A number from 0 to ``n - 1``."""

    def some_bytes(self, most: int) -> bytes: ...


class ByteChoices:
    """One byte for each decision, or as many as its range needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, n: int) -> int:
        return int.from_bytes(self._take((max(1, n - 1).bit_length() + 7) // 8), "little") % n

    def some_bytes(self, most: int) -> bytes:
        return self._take(min(self.below(most + 1), len(self._data) - self._at))

    def _take(self, n: int) -> bytes:
        if len(self._data) - self._at < n:
            raise Exhausted
        self._at += n
        return self._data[self._at - n : self._at]


class DrawnChoices:
    """hypothesis decides, and can make what it finds smaller."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def below(self, n: int) -> int:
        drawn: int = self._data.draw(st.integers(0, n - 1))
        return drawn

    def some_bytes(self, most: int) -> bytes:
        drawn: bytes = self._data.draw(st.binary(max_size=most))
        return drawn


def one_of(choices: Choices, values: Sequence[T]) -> T:
    return values[choices.below(len(values))]


def true_or(choices: Choices, truth: T, *lies: Any) -> T:
    """Mostly the truth: a sequence of frames of which each may be wrong gets nowhere."""
    at = choices.below(_TRUTHS + len(lies))
    told: T = truth if at < _TRUTHS else lies[at - _TRUTHS]
    return told

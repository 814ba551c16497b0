"""What callers pass, checked and converted once: each refusal names the argument, its value and what is wanted.

Without numpy, whose numbers pass all the same: they are registered as what they are.
"""

from __future__ import annotations

import os
from numbers import Integral, Real

from shmsched.errors import InvalidRequest

LONGEST_S = 2_000_000
"""Twenty-three days: longer than any wait, and no more than ``poll`` can be told, in milliseconds below 2**31."""
_MOST_SHOWN = 120

STRANGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a value of somebody else's raises as it is looked at. What else comes there is no fault of the value: an alarm's, say."""


def shown(value: object) -> str:
    """``repr(value)`` for a message: short, on one line, and whatever its ``__repr__`` may do."""
    try:
        text = repr(value)
    except STRANGE:
        # Python refuses to write integers of more than 4,300 digits.
        size = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{size}>"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 20]}... ({len(text):,} characters)"


def whole(name: str, value: object, least: int, most: int, *, where: str = "") -> int:
    """``value`` as an int from ``least`` to ``most``. Raises InvalidRequest; ``where``: what else to say of the limits."""
    if type(value) is int and least <= value <= most:
        return value
    number = _as_int(value)
    if number is None or not least <= number <= most:
        raise InvalidRequest(
            f"{name} is {shown(value)}; it must be a whole number {_between(least, most)}{where and ' ' + where}"
        )
    return number


def whole_or_none(name: str, value: object, least: int, most: int) -> int | None:
    """The same, or None."""
    return None if value is None else whole(name, value, least, most, where="or None")


def number(name: str, value: object, least: float, most: float, *, where: str = "") -> float:
    """``value`` as a float from ``least`` to ``most``; never a NaN. Raises InvalidRequest."""
    if type(value) is float and least <= value <= most:
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            # As a float at once: one of numpy's narrower ones warns as it is compared with a limit beyond its own.
            if least <= (converted := float(value)) <= most:
                return converted
        except STRANGE:
            # A number of somebody else's.
            pass
    raise InvalidRequest(
        f"{name} is {shown(value)}; it must be a number {_between(least, most)}{where and ' ' + where}"
    )


def seconds(name: str, value: object) -> float | None:
    """How long to wait: from 0 on. None, infinite, or longer than any wait: without end. Raises InvalidRequest."""
    if value is None:
        return None
    wait = number(name, value, 0, float("inf"), where="(seconds), or None to wait without end")
    return wait if wait <= LONGEST_S else None


def waiting(name: str, value: object) -> float | None:
    """The same as futures have it, who take what is below 0 for 0. Raises InvalidRequest."""
    if value is None:
        return None
    wait = number(name, value, float("-inf"), float("inf"), where="(seconds), or None to wait without end")
    return max(0.0, wait) if wait <= LONGEST_S else None


def flag(name: str, value: object) -> bool:
    """``value`` as True or False, numpy's among them. Raises InvalidRequest."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise InvalidRequest(f"{name} is {shown(value)}; True or False is wanted")


def text(name: str, value: object, *, most_bytes: int | None = None) -> str:
    """A text that has a form in UTF-8. Raises InvalidRequest, which names a lone surrogate and its place."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {shown(value)}; a text (str) is wanted")
    try:
        n = len(value.encode())
    except UnicodeEncodeError as e:
        raise InvalidRequest(
            f"{name} has a lone surrogate, {value[e.start]!r}, at character {e.start}, which is no text:"
            f" {shown(value)}. Decode bytes with errors='replace'"
        ) from None
    if most_bytes is not None and n > most_bytes:
        raise InvalidRequest(f"{name} is {shown(value)}, {n:,} bytes long; at most {most_bytes:,} are wanted")
    return value


def path(name: str, value: object) -> str:
    """A path of a file. Raises InvalidRequest."""
    if isinstance(value, str | os.PathLike):
        try:
            found = os.fspath(value)
            if isinstance(found, str) and found and b"\0" not in os.fsencode(found):
                return found
        except STRANGE:
            pass
    raise InvalidRequest(f"{name} is {shown(value)}; a path (str or os.PathLike) without zero bytes is wanted")


def _as_int(value: object) -> int | None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        return None
    try:
        return int(value)
    except STRANGE:
        return None


def _between(least: float, most: float) -> str:
    if least == float("-inf"):
        return "that is one"
    if most == float("inf"):
        return f"of {least:g} or more"
    return f"from {_limit(least)} to {_limit(most)}"


def _limit(value: float) -> str:
    for power in (31, 32, 63, 64):
        if value == 2**power - 1 and isinstance(value, int):
            return f"2**{power} - 1"
    return str(value) if isinstance(value, int) else f"{value:g}"

"""The options of our own engines, checked as they are made."""

from __future__ import annotations

from shmsched import arguments
from shmsched.errors import EngineOptionError, InvalidRequest


def whole(engine: str, name: str, value: object, least: int, most: int = 2**31 - 1, *, where: str = "") -> int:
    """A whole number from ``least`` to ``most``. Raises EngineOptionError that names engine, option and value."""
    try:
        return arguments.whole(f"{engine}: {name}", value, least, most, where=where)
    except InvalidRequest as e:
        raise EngineOptionError(str(e)) from None


def number(engine: str, name: str, value: object, least: float, most: float) -> float:
    """A number from ``least`` to ``most``, likewise."""
    try:
        return arguments.number(f"{engine}: {name}", value, least, most)
    except InvalidRequest as e:
        raise EngineOptionError(str(e)) from None

"""Attributes that are made when they are first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:

    def lazily(make: Callable[[Any], T]) -> T:
        """To whoever reads or assigns it, it is an attribute like any other."""
else:

    class lazily(Generic[T]):
        """``functools.cached_property`` without the lock that Python 3.11 still takes, which costs more than most of what is
        made. Assigning the attribute works too, as with any other."""

        def __init__(self, make: Callable[[Any], T]) -> None:
            self._make = make
            self._name = make.__name__
            self.__doc__ = make.__doc__

        def __get__(self, owner: Any, owner_type: type) -> T:
            if owner is None:
                return self
            value = owner.__dict__[self._name] = self._make(owner)
            return value


__all__ = ["lazily"]

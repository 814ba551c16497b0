"""What lives in one process and must not be copied: it would be a second owner of one connection."""

from __future__ import annotations

from typing import ClassVar, NoReturn


def not_copied(self: object) -> NoReturn:
    """The ``__reduce__`` of what has its place among other things of this process."""
    raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: others of this process refer to it")


def of_a_connection(self: object) -> NoReturn:
    """The same of what belongs to a client, with what to do instead."""
    instead = getattr(self, "_instead", NotCopied._instead)
    raise TypeError(
        f"a {type(self).__name__} cannot be pickled or copied: it belongs to a connection of this process; {instead}"
    )


class NotCopied:
    """``pickle``, ``copy`` and whatever is built on them (spawned processes, joblib, Dask) are refused with what to do instead."""

    __slots__ = ()

    _instead: ClassVar[str] = "make a Client there, with socket= of the same daemon"

    __reduce__ = of_a_connection

"""What any peer may say, and what those who ask for status or a stop say."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from shmsched.errors import ProtocolError
from shmsched.wire.codec import F64, U8, U16, U32, U64, Blob, Text, frame

MAGIC = int.from_bytes(b"shmsched", "little")
MAJOR = 2
"""Peers of another major version are refused in words. The layout of shared memory belongs to it."""
MINOR = 1
"""A newer minor version may append to a frame; older peers ignore what they do not know."""


class Role(IntEnum):
    CLIENT = 1
    ENGINE = 2
    CONTROL = 3


class Rewinds(IntEnum):
    """Where an engine can take a session back to."""

    NOWHERE = 0
    ANYWHERE = 1
    TO_THE_BEGINNING = 2

    @classmethod
    def of(cls, value: int) -> Rewinds:
        """What a frame says. Raises ProtocolError."""
        if value not in cls._value2member_map_:
            raise ProtocolError(f"rewinds is {value}; {', '.join(f'{m.value} ({m.name})' for m in cls)} are known")
        return cls(value)

    def reach(self, position: int) -> bool:
        """Whether ``position`` of a longer session can be gone back to."""
        return self is Rewinds.ANYWHERE or (self is Rewinds.TO_THE_BEGINNING and position == 0)

    @property
    def in_words(self) -> str:
        """What an engine can do."""
        return ("cannot rewind", "can rewind anywhere", "can rewind to the beginning only, position 0")[self]


@frame(1)
class Hello(NamedTuple):
    """The first frame of every connection, to the scheduler."""

    magic: U64
    major: U16
    minor: U16
    role: U8


@frame(2)
class Refused(NamedTuple):
    """The last frame before the scheduler closes a connection: why."""

    code: U16
    message: Text


@frame(3)
class Stopping(NamedTuple):
    """The scheduler takes no new sessions, and ends when the open ones have closed or ``drain_s`` seconds have passed."""

    drain_s: F64


# --- control ------------------------------------------------------------------------------------------------------------


@frame(80)
class AskStatus(NamedTuple):
    """``batches``: how many of each engine's last batches to tell of."""

    batches: U32


@frame(81)
class Status(NamedTuple):
    """A JSON document."""

    document: Blob


@frame(82)
class Stop(NamedTuple):
    """Answered with Stopping. A negative ``drain_s`` leaves the daemon's own drain time-out."""

    drain_s: F64

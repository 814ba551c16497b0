"""What any peer may say, and what those who ask for status or a stop say."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from shmsched.wire.codec import F64, U8, U16, U32, U64, Blob, Text, frame

MAGIC = int.from_bytes(b"shmsched", "little")
MAJOR = 2
"""Peers of another major version are refused in words. The layout of shared memory belongs to it."""
MINOR = 0
"""A newer minor version may append to a frame; older peers ignore what they do not know."""


class Role(IntEnum):
    CLIENT = 1
    ENGINE = 2
    CONTROL = 3


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

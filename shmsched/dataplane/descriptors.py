"""Steps as a client describes them to the scheduler."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from shmsched.dataplane.layouts import SAMPLING


class StepFlags(IntEnum):
    SAMPLED = 1
    MORE = 2
    """Another chunk of the same submission follows."""


MAX_STOP_TOKENS = 16
"""That a generation may name."""


class StepDescriptor(NamedTuple):
    """One step. Its tokens are the next ``n_tokens`` of the ring. ``rows_offset`` counts for raw steps only, ``sampling`` (as
    ``dataplane.layouts.SAMPLING`` packs it) for others.

    ``further``: how many decodes the scheduler may queue after this step by itself, each with the token that the one before
    it gave, until one gives a stop token: the next ``n_stop_tokens`` of those in the frame. ``deadline``: when it must have
    been dispatched, in seconds of CLOCK_MONOTONIC, which all processes of the machine share; 0 for none.
    """

    request: int
    session: int
    n_tokens: int
    position: int
    output_rows: int
    flags: int
    sampling: bytes
    rows_offset: int
    further: int = 0
    n_stop_tokens: int = 0
    deadline: float = 0.0


STEP_DESCRIPTOR = struct.Struct(f"<QQIIBB{SAMPLING.size}sQIBd")
WANTED = struct.Struct(f"<BB{SAMPLING.size}sQIBd")
"""The fields of a descriptor from ``output_rows`` on: what is wanted of a step, which is the same for most of a client's."""
_BRIEFLY = struct.Struct(f"<QQII{WANTED.size}s")
WANTED_BEFORE_ROWS, WANTED_AFTER_ROWS = slice(2 + SAMPLING.size), slice(10 + SAMPLING.size, None)
"""Where of WANTED lies what is the same for each step, before ``rows_offset`` and after."""
ROWS_DESCRIPTOR = struct.Struct(f"<QQII{2 + SAMPLING.size}sQ{WANTED.size - SAMPLING.size - 10}s")
"""STEP_DESCRIPTOR with these in one piece each."""


class StepRows(Sequence[StepDescriptor]):
    """The descriptors in a Submit that was read."""

    __slots__ = ("_packed",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def briefly(self) -> Iterator[tuple[int, int, int, int, bytes]]:
        """``request``, ``session``, ``n_tokens``, ``position``, and what is wanted as WANTED packs it: 0.2 us a step, where
        the descriptors themselves take 0.7."""
        return _BRIEFLY.iter_unpack(self._packed)

    def __len__(self) -> int:
        return len(self._packed) // STEP_DESCRIPTOR.size

    def __iter__(self) -> Iterator[StepDescriptor]:
        return map(StepDescriptor._make, STEP_DESCRIPTOR.iter_unpack(self._packed))

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StepRows):
            return self._packed == other._packed
        return list(self) == other

    def __repr__(self) -> str:
        return repr(list(self))


SUBMIT_HEAD = struct.Struct("<HHQQQQI")
SUBMIT = 34
"""The number of its frame."""
NO_STOPS = bytes(4)


def pack_submit(
    tokens_written: int,
    records_read: int,
    results_read: int,
    stream_read: int,
    steps: bytes,
    stop_tokens: Sequence[int],
) -> bytes:
    """A framed ``wire.frames.Submit`` of packed descriptors, in a third of the time: every step pays for it."""
    n = len(steps) // STEP_DESCRIPTOR.size
    head = SUBMIT_HEAD.pack(SUBMIT, 0, tokens_written, records_read, results_read, stream_read, n)
    stops = struct.pack(f"<I{len(stop_tokens)}I", len(stop_tokens), *stop_tokens) if stop_tokens else NO_STOPS
    payload = head + steps + stops
    return len(payload).to_bytes(4, "big") + payload

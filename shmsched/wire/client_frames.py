"""What scheduler and clients say to each other."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

from shmsched.memory.layouts import SAMPLING
from shmsched.wire.codec import U8, U16, U32, U64, Blob, Buffer, Text, U32s, U64s, frame, rows_part, shortcut
from shmsched.wire.framing import framed

# --- scheduler to client ------------------------------------------------------------------------------------------------


@frame(16)
class Welcome(NamedTuple):
    """Carries the descriptor of the client's segment. Models come before it, so that they are known once it is here."""

    client: U64
    daemon_pid: U32
    ring_tokens: U32
    records: U32
    results: U32
    stream: U32
    max_arena: U64


@frame(17)
class Model(NamedTuple):
    """A model and what every session of it can rely on; sent again when ``engines`` (those ready) changes."""

    vocab_size: U32
    max_sessions: U32
    max_session_tokens: U32
    max_decode_sequences: U32
    max_prefill_chunk_size: U32
    engines: U32
    rewinds: U8
    """One of Rewinds: what each of its engines can do."""
    supports_fork: U8
    model: Text
    tokenizer: Text
    stop_tokens: U32s


class SessionLimits(NamedTuple):
    """What a session can rely on: what its engine can take, and do."""

    max_session_tokens: int
    max_prefill_chunk_size: int
    rewinds: int
    """One of Rewinds."""
    supports_fork: int


@frame(18)
class SessionOpened(NamedTuple):
    """It is open in ``engine``."""

    session: U64
    engine: U64
    model: Text
    limits: U32s
    """As SessionLimits has them."""


@frame(19)
class SessionRefused(NamedTuple):
    session: U64
    code: U16
    message: Text


@frame(20)
class SessionEnded(NamedTuple):
    """The session is gone without its client having closed it."""

    session: U64
    code: U16
    message: Text


@frame(21)
class Completions(NamedTuple):
    """Up to these cursors records, results and streamed tokens are the client's to read, the streamed tokens before the
    records; the ring is free before ``tokens_read``."""

    records_written: U64
    results_written: U64
    stream_written: U64
    tokens_read: U64


_COMPLETIONS = struct.Struct("<HHQQQQ")


@shortcut(Completions)
def unpack_completions(payload: Buffer) -> Completions | None:
    """One for each batch: 0.6 us instead of 2."""
    if len(payload) != _COMPLETIONS.size:
        return None
    _, _, records, results, stream, tokens = _COMPLETIONS.unpack(payload)
    return Completions(records, results, stream, tokens)


@frame(22)
class Failed(NamedTuple):
    """These steps failed, or were cancelled. ``rows_held``: their logits rows are not free yet, a Returned will say when."""

    code: U16
    rows_held: U8
    message: Text
    requests: U64s


@frame(23)
class Returned(NamedTuple):
    """No engine can write into the logits rows of these steps any more."""

    requests: U64s


@frame(24)
class Arena(NamedTuple):
    """Carries the descriptor of the client's arena."""

    size: U64


@frame(25)
class ArenaRefused(NamedTuple):
    code: U16
    message: Text


# --- client to scheduler ------------------------------------------------------------------------------------------------


MAX_OPTIONS = 65536
"""Bytes that a session may pass to its engine."""


class Block(IntEnum):
    """Whether to wait for a free slot."""

    NO = 0
    WHILE_ENGINES_COME = 1
    """As long as an engine is there, or being started."""
    UNTIL_GIVEN_UP = 2
    """Until the client closes the session again: it has a time-out, and an engine may be attached by then."""


@frame(32)
class OpenSession(NamedTuple):
    """``model`` may be empty where there is one only. ``block`` is a Block."""

    session: U64
    block: U8
    model: Text
    options: Blob


@frame(33)
class CloseSession(NamedTuple):
    session: U64


class StepFlags(IntEnum):
    SAMPLED = 1
    MORE = 2
    """Another chunk of the same submission follows."""


MAX_STOP_TOKENS = 16
"""That a generation may name."""


class StepDescriptor(NamedTuple):
    """One step. Its tokens are the next ``n_tokens`` of the ring. ``rows_offset`` counts for raw steps only, ``sampling`` (as
    ``memory.layouts.SAMPLING`` packs it) for others.

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


StepDescriptors = Annotated[Sequence[StepDescriptor], rows_part(STEP_DESCRIPTOR, StepRows)]


@frame(34)
class Submit(NamedTuple):
    """Steps in submission order, and how far the client has read what the scheduler wrote."""

    tokens_written: U64
    records_read: U64
    results_read: U64
    stream_read: U64
    steps: StepDescriptors
    stop_tokens: U32s = ()


_SUBMIT_HEAD = struct.Struct("<HHQQQQI")
_NO_STOPS = bytes(4)


def pack_submit(
    tokens_written: int,
    records_read: int,
    results_read: int,
    stream_read: int,
    steps: bytes,
    stop_tokens: Sequence[int],
) -> bytes:
    """``framed(pack(Submit(...)))`` of packed descriptors, in a third of the time: it is what every step pays for."""
    n = len(steps) // STEP_DESCRIPTOR.size
    head = _SUBMIT_HEAD.pack(34, 0, tokens_written, records_read, results_read, stream_read, n)
    stops = struct.pack(f"<I{len(stop_tokens)}I", len(stop_tokens), *stop_tokens) if stop_tokens else _NO_STOPS
    return framed(head + steps + stops)


@shortcut(Submit)
def unpack_submit(payload: Buffer) -> Submit | None:
    """A Submit without stop tokens: 1.1 us instead of 4, and that for each decode of a client that steps by itself."""
    end = len(payload) - 4
    if end < _SUBMIT_HEAD.size:
        return None
    _, _, tokens_written, records_read, results_read, stream_read, n = _SUBMIT_HEAD.unpack_from(payload)
    if end != _SUBMIT_HEAD.size + n * STEP_DESCRIPTOR.size or payload[end:] != _NO_STOPS:
        return None
    rows = StepRows(bytes(payload[_SUBMIT_HEAD.size : end]))
    return Submit(tokens_written, records_read, results_read, stream_read, rows)


@frame(35)
class Cancel(NamedTuple):
    """Settle every outstanding step of the session from ``request`` on; its next position is at most ``position``."""

    session: U64
    request: U64
    position: U32


@frame(36)
class OpenArena(NamedTuple):
    size: U64


@frame(37)
class Consumed(NamedTuple):
    """How far the client has read, where no submission of its says so."""

    records_read: U64
    results_read: U64
    stream_read: U64


@frame(38)
class Halt(NamedTuple):
    """Queue no further decode for this generation: what is queued or runs is answered as its last step."""

    session: U64
    request: U64


@frame(39)
class ForkSession(NamedTuple):
    """Open ``session`` with the first ``length`` tokens of ``parent``, in the same engine."""

    session: U64
    parent: U64
    length: U32

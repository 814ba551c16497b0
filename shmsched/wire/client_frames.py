"""What scheduler and clients say to each other."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple

from shmsched.dataplane.descriptors import (
    NO_STOPS,
    STEP_DESCRIPTOR,
    SUBMIT,
    SUBMIT_HEAD,
    StepDescriptor,
    StepRows,
)
from shmsched.wire.codec import U8, U16, U32, U64, Blob, Buffer, Text, U32s, U64s, frame, rows_part, shortcut

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


StepDescriptors = Annotated[Sequence[StepDescriptor], rows_part(STEP_DESCRIPTOR, StepRows)]


@frame(SUBMIT)
class Submit(NamedTuple):
    """Steps in submission order, and how far the client has read what the scheduler wrote."""

    tokens_written: U64
    records_read: U64
    results_read: U64
    stream_read: U64
    steps: StepDescriptors
    stop_tokens: U32s = ()


@shortcut(Submit)
def unpack_submit(payload: Buffer) -> Submit | None:
    """A Submit without stop tokens: 1.1 us instead of 4, and that for each decode of a client that steps by itself."""
    end = len(payload) - 4
    if end < SUBMIT_HEAD.size:
        return None
    _, _, tokens_written, records_read, results_read, stream_read, n = SUBMIT_HEAD.unpack_from(payload)
    if end != SUBMIT_HEAD.size + n * STEP_DESCRIPTOR.size or payload[end:] != NO_STOPS:
        return None
    rows = StepRows(bytes(payload[SUBMIT_HEAD.size : end]))
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

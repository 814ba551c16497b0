"""What engines and scheduler say to each other."""

from __future__ import annotations

import struct
from typing import NamedTuple

from shmsched.wire.codec import F32, U8, U16, U32, U64, Blob, Buffer, Text, Texts, U32s, frame, pack, shortcut
from shmsched.wire.framing import framed

# --- engine to scheduler ------------------------------------------------------------------------------------------------


@frame(48)
class Offer(NamedTuple):
    """What the engine serves; follows its Hello. A limit of 0 is none of its own."""

    vocab_size: U32
    max_sessions: U32
    max_session_tokens: U32
    max_batch_size: U32
    max_decode_sequences: U32
    max_prefill_chunk_size: U32
    rewinds: U8
    """One of Rewinds."""
    supports_fork: U8
    model: Text
    tokenizer: Text
    stop_tokens: U32s
    spec: Text


@frame(49)
class Ready(NamedTuple):
    """The engine has started."""

    seconds: F32


@frame(50)
class StartFailed(NamedTuple):
    message: Text


@frame(51)
class SlotRefused(NamedTuple):
    """The engine would not open this session."""

    slot: U32
    session: U64
    code: U16
    message: Text


@frame(52)
class SlotOpened(NamedTuple):
    slot: U32
    session: U64


@frame(53)
class Done(NamedTuple):
    """The results of this batch are in its slot. ``messages`` are those of the steps that failed, in step order."""

    batch: U64
    messages: Texts


_NOTHING_FAILED = struct.Struct("<HHQI")


def pack_done(batch: int, messages: tuple[str, ...]) -> bytes:
    """``framed(pack(Done(batch, messages)))``, in 0.3 us instead of 4.3 where there is no message."""
    if messages:
        return framed(pack(Done(batch, messages)))
    return framed(_NOTHING_FAILED.pack(53, 0, batch, 0))


@shortcut(Done)
def unpack_done(payload: Buffer) -> Done | None:
    """A Done without messages, which is nearly every one."""
    if len(payload) != _NOTHING_FAILED.size:
        return None
    _, _, batch, n_messages = _NOTHING_FAILED.unpack(payload)
    return None if n_messages else Done(batch, ())


@frame(54)
class BatchFailed(NamedTuple):
    """The engine raised: nothing of this batch counts, and its sessions are lost."""

    batch: U64
    message: Text


@frame(55)
class Faulty(NamedTuple):
    """The engine has written where it must not: nothing that it says or writes counts any more."""

    message: Text


@frame(56)
class Skipped(NamedTuple):
    """Nothing of this batch was run: it follows one of which not every step was done."""

    batch: U64


# --- scheduler to engine ------------------------------------------------------------------------------------------------


@frame(64)
class Attached(NamedTuple):
    """Carries the descriptor of the engine's segment: ``slots`` batch slots, one after the other."""

    engine: U64
    max_decode_sequences: U32
    max_prefill_chunk_size: U32
    slots: U32


@frame(65)
class OpenSlot(NamedTuple):
    slot: U32
    session: U64
    options: Blob


@frame(66)
class CloseSlot(NamedTuple):
    slot: U32


@frame(67)
class AttachArena(NamedTuple):
    """Carries the descriptor of a client's arena; comes before the first batch that names the client.

    With a size of 0 it carries none: the scheduler could not pass it on.
    """

    client: U64
    size: U64


@frame(68)
class DetachArena(NamedTuple):
    """No later batch names this client."""

    client: U64


@frame(70)
class ForkSlot(NamedTuple):
    """Open ``slot`` with the first ``length`` tokens of the session in slot ``parent``."""

    slot: U32
    session: U64
    parent: U32
    length: U32


@frame(69)
class Work(NamedTuple):
    """The batch in ``slot`` is the engine's until its Done or BatchFailed."""

    batch: U64
    slot: U32


@frame(71)
class Follow(NamedTuple):
    """Work that goes on where batch ``follows`` ends, and is given before that has ended: in the place of each token lies which of
    that batch's sampled tokens it is. If not every step of that one is done, nothing of this one is run: Skipped."""

    batch: U64
    slot: U32
    follows: U64


_WORK = struct.Struct("<HHQI")
_FOLLOW = struct.Struct("<HHQIQ")


@shortcut(Work)
def unpack_work(payload: Buffer) -> Work | None:
    """A Work of this version, in 1.0 us instead of 1.8."""
    if len(payload) != _WORK.size:
        return None
    _, _, batch, slot = _WORK.unpack(payload)
    return Work(batch, slot)


@shortcut(Follow)
def unpack_follow(payload: Buffer) -> Follow | None:
    """A Follow of this version, as with Work."""
    if len(payload) != _FOLLOW.size:
        return None
    _, _, batch, slot, follows = _FOLLOW.unpack(payload)
    return Follow(batch, slot, follows)

"""How a frame becomes bytes: fixed binary layouts, declared as named tuples.

A frame is ``kind`` (u16), ``flags`` (u16, zero for now), its scalars in order of declaration, then its variable parts in
order of declaration, each with its own length in front. Everything is little-endian and unaligned. Bytes after the last
declared part are a newer minor version's business and are ignored.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from shmsched.errors import ProtocolError
from shmsched.wire.framing import framed

Buffer = bytes | bytearray | memoryview

U8 = Annotated[int, "B"]
U16 = Annotated[int, "H"]
U32 = Annotated[int, "I"]
U64 = Annotated[int, "Q"]
F32 = Annotated[float, "f"]
F64 = Annotated[float, "d"]


class Part(NamedTuple):
    """A variable part: how it is written after its length, and read back."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[memoryview, int], tuple[Any, int]]


def _take(view: memoryview, at: int, n: int) -> tuple[memoryview, int]:
    if len(view) - at < n:
        raise ProtocolError(f"a part of {n} bytes at offset {at} does not fit a frame of {len(view)} bytes")
    return view[at : at + n], at + n


def _bytes_part(length: struct.Struct) -> Part:
    def pack(value: bytes) -> bytes:
        return length.pack(len(value)) + value

    def unpack(view: memoryview, at: int) -> tuple[bytes, int]:
        head, at = _take(view, at, length.size)
        body, at = _take(view, at, length.unpack(head)[0])
        return bytes(body), at

    return Part(pack, unpack)


_blob = _bytes_part(struct.Struct("<I"))
_short = _bytes_part(struct.Struct("<H"))


def _unpack_text(view: memoryview, at: int) -> tuple[str, int]:
    raw, at = _short.unpack(view, at)
    try:
        return raw.decode(), at
    except UnicodeDecodeError as e:
        raise ProtocolError(f"a text is not UTF-8: {e}") from e


def _pack_text(value: str, most: int = 65535) -> bytes:
    data = value.encode(errors="replace")
    if len(data) > most:
        # Cut between characters: half of one is no text.
        data = data[:most].decode(errors="ignore").encode()
    return _short.pack(data)


def rows_part(row: struct.Struct, make: Callable[[bytes], Any]) -> Part:
    """A counted run of fixed-size rows. ``make`` turns their bytes into what is to be read of them."""

    def pack(rows: Any) -> bytes:
        packed = b"".join([row.pack(*r) for r in rows])
        return len(rows).to_bytes(4, "little") + packed

    def unpack(view: memoryview, at: int) -> tuple[Any, int]:
        head, at = _take(view, at, 4)
        body, at = _take(view, at, row.size * int.from_bytes(head, "little"))
        return make(bytes(body)), at

    return Part(pack, unpack)


def _integers_part(code: str) -> Part:
    size = struct.calcsize("<" + code)

    def pack(values: Any) -> bytes:
        return struct.pack(f"<I{len(values)}{code}", len(values), *values)

    def unpack(view: memoryview, at: int) -> tuple[tuple[int, ...], int]:
        head, at = _take(view, at, 4)
        n = int.from_bytes(head, "little")
        body, at = _take(view, at, n * size)
        return struct.unpack(f"<{n}{code}", body), at

    return Part(pack, unpack)


_TEXTS_BYTES = 1 << 19


def _pack_texts(values: tuple[str, ...]) -> bytes:
    # However many there are and whatever they say, the frame stays one that the other side takes.
    most = min(65535, _TEXTS_BYTES // max(1, len(values)))
    return len(values).to_bytes(4, "little") + b"".join([_pack_text(v, most) for v in values])


def _unpack_texts(view: memoryview, at: int) -> tuple[tuple[str, ...], int]:
    head, at = _take(view, at, 4)
    texts = []
    for _ in range(int.from_bytes(head, "little")):
        text, at = _unpack_text(view, at)
        texts.append(text)
    return tuple(texts), at


Text = Annotated[str, Part(_pack_text, _unpack_text)]
Texts = Annotated[tuple[str, ...], Part(_pack_texts, _unpack_texts)]
Blob = Annotated[bytes, _blob]
U32s = Annotated[tuple[int, ...], _integers_part("I")]
U64s = Annotated[tuple[int, ...], _integers_part("Q")]

FrameT = TypeVar("FrameT")


class _Layout(NamedTuple):
    make: type[Any]
    kind: int
    head: struct.Struct
    n_scalars: int
    parts: tuple[Part, ...]
    framed_head: struct.Struct
    """The head with the frame's length in front, for frames that are a head and nothing else."""
    length: bytes


_by_kind: dict[int, _Layout] = {}
_by_type: dict[type[Any], _Layout] = {}
_shortcuts: dict[int, Callable[[Buffer], Any | None]] = {}


def frame(kind: int) -> Callable[[type[FrameT]], type[FrameT]]:
    """Declare a named tuple to be the frame with this number: scalars first, then variable parts."""

    def declare(cls: type[FrameT]) -> type[FrameT]:
        hints = get_type_hints(cls, vars(sys.modules[cls.__module__]), include_extras=True)
        marks = [hint.__metadata__[0] for hint in hints.values()]
        scalars = [m for m in marks if isinstance(m, str)]
        if marks[: len(scalars)] != scalars or kind in _by_kind:
            raise TypeError(f"{cls.__name__}: scalars come before parts, and kind {kind} is used once")
        head = struct.Struct("<HH" + "".join(scalars))
        framed_head = struct.Struct("<4sHH" + "".join(scalars))
        parts = tuple(marks[len(scalars) :])
        layout = _Layout(cls, kind, head, len(scalars), parts, framed_head, framed(bytes(head.size))[:4])
        _by_kind[kind] = _by_type[cls] = layout
        return cls

    return declare


def shortcut(cls: type[Any]) -> Callable[[Callable[[Buffer], FrameT | None]], Callable[[Buffer], FrameT | None]]:
    """Declare a faster way to unpack the commonest form of a frame. It gives None for every other form, or the very
    frame that ``unpack_declared`` gives."""

    def declare(unpack_common: Callable[[Buffer], FrameT | None]) -> Callable[[Buffer], FrameT | None]:
        _shortcuts[_by_type[cls].kind] = unpack_common
        return unpack_common

    return declare


def pack(message: Any) -> bytes:
    """The frame's bytes, without the length in front."""
    layout = _by_type[type(message)]
    head = layout.head.pack(layout.kind, 0, *message[: layout.n_scalars])
    if not layout.parts:
        return head
    return head + b"".join([part.pack(v) for part, v in zip(layout.parts, message[layout.n_scalars :], strict=True)])


def pack_framed(message: Any) -> bytes:
    """``framed(pack(message))``: for a frame of scalars alone 0.7 us instead of 1.5."""
    layout = _by_type[type(message)]
    if layout.parts:
        return framed(pack(message))
    return layout.framed_head.pack(layout.length, layout.kind, 0, *message)


def unpack(payload: Buffer) -> Any:
    """The frame in ``payload``. Raises ProtocolError if there is none."""
    common = _shortcuts.get(int.from_bytes(payload[:2], "little"))
    if common is not None and (message := common(payload)) is not None:
        return message
    return unpack_declared(payload)


def unpack_declared(payload: Buffer) -> Any:
    """``unpack`` by the declaration of the frame alone."""
    view = memoryview(payload)
    if len(view) < 4:
        raise ProtocolError(f"a frame of {len(view)} bytes; the shortest has 4")
    layout = _by_kind.get(int.from_bytes(view[:2], "little"))
    if layout is None:
        raise ProtocolError(f"a frame of unknown kind {int.from_bytes(view[:2], 'little')}")
    if len(view) < layout.head.size:
        raise ProtocolError(f"a {layout.make.__name__} frame of {len(view)} bytes; it has at least {layout.head.size}")
    scalars = layout.head.unpack_from(view)[2:]
    if not layout.parts:
        return layout.make(*scalars)
    values: list[Any] = list(scalars)
    at = layout.head.size
    for part in layout.parts:
        value, at = part.unpack(view, at)
        values.append(value)
    return layout.make(*values)

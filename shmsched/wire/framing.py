"""Frames on a byte stream, as ``multiprocessing.connection.Connection.send_bytes`` writes them.

A frame is its length, 4 bytes big-endian, and its payload. A plain ``multiprocessing`` connection can therefore speak to
the daemon, and clients and engines do send through one. Its escape for frames over 2 GiB (length -1) is not used.
"""

from __future__ import annotations

import struct

from shmsched.errors import ProtocolError

MAX_FRAME = 1 << 20
_LENGTH = struct.Struct("!i")


def framed(payload: bytes) -> bytes:
    """The payload with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


class FrameSplitter:
    """Cuts a stream into payloads. Holds at most one unfinished frame, and looks at it again only once it is whole."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_frame = max_frame
        self._pending = bytearray()
        self._wanted = 4

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are whole now. Raises ProtocolError at a length that no frame has."""
        if not self._pending:
            n = len(data) - 4
            if 0 < n <= self._max_frame and int.from_bytes(data[:4], "big") == n:
                return [data[4:]]  # one whole frame, as nearly always
        else:
            self._pending += data
            if len(self._pending) < self._wanted:
                return []
            data = bytes(self._pending)
            self._pending.clear()
        payloads, at, self._wanted = cut(data, self._max_frame)
        if at < len(data):
            self._pending += data[at:]
        return payloads


def cut(data: bytes, max_frame: int = MAX_FRAME) -> tuple[list[bytes], int, int]:
    """The payloads that are whole in ``data``, where the rest begins, and how long that must be to be looked at again. Raises
    ProtocolError at a length that no frame has."""
    at, available = 0, len(data)
    payloads: list[bytes] = []
    while available - at >= 4:
        (n,) = _LENGTH.unpack_from(data, at)
        if not 0 < n <= max_frame:
            raise ProtocolError(f"a frame of {n} bytes; at most {max_frame} are allowed")
        if available - at - 4 < n:
            return payloads, at, 4 + n
        payloads.append(data[at + 4 : at + 4 + n])
        at += 4 + n
    return payloads, at, 4

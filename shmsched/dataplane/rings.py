"""Rings in shared memory. Cursors count from the beginning of time and travel in frames; none is stored in the memory."""

from __future__ import annotations

import struct
from typing import Any

from shmsched.not_copied import not_copied


class TokenWriter:
    """The client's end of its token ring: it writes, and learns by frames how far the scheduler has read."""

    __slots__ = ("_bytes", "capacity", "read", "written")
    __reduce__ = not_copied

    def __init__(self, buffer: memoryview) -> None:
        """``buffer``: the ring's bytes, 4 for each token."""
        self._bytes = buffer
        self.capacity = len(buffer) // 4
        self.written = 0
        self.read = 0

    @property
    def room(self) -> int:
        return self.capacity - (self.written - self.read)

    def put(self, tokens: bytes) -> int:
        """Lay ``tokens`` (int32, little-endian) behind those written; the caller has seen that there is room.

        They count once ``written`` is what this returns, which is the caller's to set: when the scheduler is told.
        """
        size = len(tokens)
        written = self.written + size // 4
        if written - self.read > self.capacity:
            raise ValueError(f"{size // 4} tokens into {self.room} free cells of the token ring")
        at = self.written % self.capacity * 4
        first = min(size, len(self._bytes) - at)
        self._bytes[at : at + first] = tokens[:first]
        if first < size:
            self._bytes[: size - first] = tokens[first:]
        return written

    def returned(self, read: int) -> None:
        """The scheduler has read everything before ``read``."""
        if not self.read <= read <= self.written:
            raise ValueError(f"the token ring was read up to {read}, but {self.read} to {self.written} is outstanding")
        self.read = read


class TokenReader:
    """The scheduler's end: it copies out what a frame says was written."""

    def __init__(self, buffer: memoryview) -> None:
        """``buffer``: the ring's bytes, 4 for each token."""
        self._bytes = buffer
        self.capacity = len(buffer) // 4
        self.read = 0

    def take(self, n: int) -> bytes:
        """The next ``n`` tokens as little-endian int32 bytes: a copy, which the client cannot change any more."""
        at = self.read % self.capacity
        self.read += n
        if at + n <= self.capacity:
            return self._bytes[4 * at : 4 * (at + n)].tobytes()
        first = self.capacity - at
        return bytes(self._bytes[4 * at :]) + bytes(self._bytes[: 4 * (n - first)])


class RecordRing:
    """A ring of fixed-size rows with one writer. Rows reach the memory all at once, at the next ``publish``."""

    def __init__(self, buffer: memoryview, row: struct.Struct) -> None:
        self._bytes = buffer
        self._row = row
        self.capacity = len(buffer) // row.size
        self.written = 0
        """How many rows were appended. A reader may be told so once they are published."""
        self.waiting: list[bytes] = []
        """What the next ``publish`` writes."""

    def append(self, *values: Any) -> None:
        """Add one row. The caller has reserved the room."""
        self.waiting.append(self._row.pack(*values))
        self.written += 1

    def append_packed(self, rows: list[bytes]) -> None:
        """Add rows that are packed already, each by itself. The caller has reserved the room."""
        self.waiting += rows
        self.written += len(rows)

    def publish(self) -> None:
        """Write what was added since the last time."""
        rows, size = b"".join(self.waiting), self._row.size
        self.waiting.clear()
        at = (self.written - len(rows) // size) % self.capacity * size
        first = min(len(rows), self.capacity * size - at)
        self._bytes[at : at + first] = rows[:first]
        if first < len(rows):
            self._bytes[: len(rows) - first] = rows[first:]


class RecordReader:
    """The reading end of a ``RecordRing``: it copies out what a frame says was written."""

    __slots__ = ("_bytes", "_row_size", "capacity", "read")
    __reduce__ = not_copied

    def __init__(self, buffer: memoryview, row_size: int) -> None:
        self._bytes = buffer
        self._row_size = row_size
        self.capacity = len(buffer) // row_size
        self.read = 0

    def take_until(self, written: int) -> bytes:
        """The rows from the last call up to ``written``. Raises ValueError if there cannot be so many."""
        rows = self.rows_until(written)
        self.read = written
        return rows

    def rows_until(self, written: int) -> bytes:
        """The same, for one who sets ``read`` to ``written`` when it has made something of them."""
        if written == self.read:
            return b""
        # Compared as it comes: no frame may say what a C integer does not hold.
        if not self.read <= written <= self.read + self.capacity:
            raise ValueError(f"a ring of {self.capacity} rows read up to {self.read} cannot be written up to {written}")
        n = written - self.read
        at, size = self.read % self.capacity, self._row_size
        first = min(n, self.capacity - at)
        rows = bytes(self._bytes[at * size : (at + first) * size])
        return rows if first == n else rows + bytes(self._bytes[: (n - first) * size])

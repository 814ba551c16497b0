"""What has arrived on a connection, until it is handled."""

from __future__ import annotations

import array
import errno
import os
import socket
from typing import Any

from shmsched.errors import ProtocolError, SharedMemoryLimit
from shmsched.limits import lacking
from shmsched.wire.codec import unpack
from shmsched.wire.framing import MAX_FRAME, cut

READ_SIZE = 1 << 16
MAX_DESCRIPTORS = 64
_LOST = -1
# Plain numbers: to combine members of an enum takes 3 us each time.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0x40000000))
_TRUNCATED = int(socket.MSG_CTRUNC)
# What a system call is given where ``map`` makes it, once.
_READ_SIZE_ONCE = (READ_SIZE,)
_ANCILLARY_ONCE = (socket.CMSG_SPACE(8 * 4),)
WAITING = (_CLOSE_ON_EXEC,)
AT_ONCE = (_CLOSE_ON_EXEC | int(socket.MSG_DONTWAIT),)
"""Whether ``arrived`` waits for the first."""

Chunk = tuple[bytes, list[tuple[int, int, bytes]], int, Any]


class _Stand:
    """How far the stream was taken. It is replaced whole, by one store."""

    __slots__ = ("chunks", "descriptors", "frames", "handled", "rest")

    def __init__(self, rest: bytes, descriptors: list[int]) -> None:
        self.rest = rest
        """The beginning of a frame that is not whole yet; behind ``frames``, where there are any."""
        self.descriptors = descriptors
        """Those that came, in order, each with a frame of its own; _LOST for one that the kernel had to drop."""
        self.chunks: list[Chunk] = []
        """At most one, as ``recvmsg`` gave it."""
        self.frames: list[Any] | None = None
        """Those in the chunk, once it was looked at."""
        self.handled = 0


class Inbound:
    """The frames that have arrived. Whoever handles them says so of each: what an interrupt keeps from it is there for the next one
    who asks. For one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._read = sock.recvmsg
        self._stand = _Stand(b"", [])

    @property
    def waits(self) -> bool:
        """Whether something is here that was not handled, or the end of the stream."""
        return bool(self._stand.chunks)

    def arrived(self, flags: tuple[int]) -> list[Any] | None:
        """The frames that are here: the same ones again until they are ``handled``; None at the end of the stream."""
        stand = self._stand
        frames = stand.frames
        if frames is not None:
            return frames[stand.handled :]
        chunks = stand.chunks
        try:
            if not chunks:
                # One call, from the system call to where it is kept: an interrupt comes before it or after it.
                chunks.extend(map(self._read, _READ_SIZE_ONCE, _ANCILLARY_ONCE, flags))
        except (InterruptedError, BlockingIOError):
            return []
        except OSError as e:
            if e.errno is None:
                # It is a signal handler's: TimeoutError, say.
                raise
            return None
        data, ancillary, came, _ = chunks[0]
        if not data:
            return None
        if ancillary or came & _TRUNCATED or stand.rest:
            return self._looked_at(stand, chunks[0])
        n = len(data) - 4
        if 0 < n <= MAX_FRAME and int.from_bytes(data[:4], "big") == n:
            stand.frames = frames = [unpack(data[4:])]  # one whole frame, as nearly always
            return frames
        return self._looked_at(stand, chunks[0])

    def _looked_at(self, stand: _Stand, chunk: Chunk) -> list[Any]:
        data, ancillary, came, _ = chunk
        descriptors = [*stand.descriptors, *_descriptors_in(ancillary)]
        if came & _TRUNCATED:
            # A read ends with the frame that carries a descriptor: it is the one of this read that was lost.
            descriptors.append(_LOST)
        data = stand.rest + data
        payloads, at, _ = cut(data)
        frames = [unpack(payload) for payload in payloads]
        now = _Stand(data[at:], descriptors)
        if frames:
            now.chunks, now.frames = stand.chunks, frames
        self._stand = now
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ProtocolError(f"{len(descriptors)} descriptors came that no frame asked for")
        return frames

    def handled(self) -> None:
        """Done with the first of the frames that ``arrived`` gives."""
        stand = self._stand
        if stand.frames is not None and stand.handled + 1 < len(stand.frames):
            stand.handled += 1
        else:
            self._stand = _Stand(stand.rest, stand.descriptors)

    def all_handled(self) -> None:
        self._stand = _Stand(self._stand.rest, self._stand.descriptors)

    def descriptor(self) -> int:
        """The descriptor that rode on the frame at hand. The caller owns it now.

        Raises ProtocolError if there is none, SharedMemoryLimit if this process may have no further one.
        """
        descriptors = self._stand.descriptors
        if not descriptors:
            raise ProtocolError("a frame came without the descriptor that belongs to it")
        fd = descriptors.pop(0)
        if fd == _LOST:
            why = lacking(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            raise SharedMemoryLimit(f"no descriptor is left for the shared memory that the scheduler sent: {why}")
        return fd

    def close_descriptors(self) -> None:
        """Those that nobody took."""
        descriptors = self._stand.descriptors
        while descriptors:
            fd = descriptors.pop()
            if fd != _LOST:
                os.close(fd)


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds.tolist()

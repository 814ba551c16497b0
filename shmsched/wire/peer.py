"""The scheduler's end of a connection: it never blocks, and what it holds is bounded."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from shmsched.errors import SystemLimit
from shmsched.limits import lacking
from shmsched.wire.codec import pack_framed, unpack
from shmsched.wire.credentials import credentials, name_of
from shmsched.wire.framing import FrameSplitter

READ_SIZE = 1 << 16
MAX_OUTBOUND = 4 << 20


class Peer:
    """Frames over a non-blocking socket."""

    def __init__(self, sock: socket.socket, max_outbound: int = MAX_OUTBOUND) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pid, self.uid, _ = credentials(sock)
        self.name = name_of(self.pid)
        self._splitter = FrameSplitter()
        self._outbound: deque[tuple[bytes, int]] = deque()
        self.max_outbound = max_outbound
        self.outbound_bytes = 0
        self._broken: OSError | None = None
        self.behind_since = 0.0
        """Since when the socket has not taken all there was for it, by the daemon's clock; 0 where it has."""
        self.on_pending: Callable[[], None] = lambda: None
        """Called when there is something to flush."""

    def read(self) -> list[Any] | None:
        """What has arrived: frames, or None at the end of the stream. Raises ProtocolError.

        A plain ``recv``: the kernel drops a descriptor that rides along, since the scheduler expects none.
        """
        try:
            data = self.sock.recv(READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        return list(map(unpack, self._splitter.feed(data)))

    def send(self, message: Any, fd: int = -1) -> None:
        """Queue a frame; ``flush`` writes it. A descriptor is duplicated, so the caller may close its own.

        Raises SystemLimit, and has sent nothing, if there is no descriptor for the duplicate and the socket does not take the
        frame at once.
        """
        data = pack_framed(message)
        was_empty = not self._outbound
        if fd < 0:
            self._outbound.append((data, fd))
        else:
            try:
                self._outbound.append((data, os.dup(fd)))
            except OSError as e:
                self._send_at_once(data, fd, e)
                return
        self.outbound_bytes += len(data)
        # Past its bound no writable socket may ever come: the next flush has to see it.
        if was_empty or self.outbound_bytes > self.max_outbound or self._broken is not None:
            self.on_pending()

    def _send_at_once(self, data: bytes, fd: int, cause: OSError) -> None:
        """A descriptor that is sent needs no duplicate."""
        try:
            sent = self._send_with(data, fd) if self.flush() else 0
        except BlockingIOError:
            sent = 0
        except OSError as e:
            # Whoever flushes next is told. Not the error itself: its traceback would keep what the callers hold, a client's
            # memory among it.
            self._broken = OSError(e.errno, e.strerror)
            self.on_pending()
            return
        if not sent:
            raise SystemLimit(f"shared memory cannot be passed on for now: {lacking(cause)}")
        if sent < len(data):
            self._outbound.append((data[sent:], -1))
            self.outbound_bytes += len(data) - sent
            self.on_pending()

    @property
    def flooded(self) -> bool:
        """Far more waits for the peer than a moment of not reading explains."""
        return self.outbound_bytes > 16 * self.max_outbound

    @property
    def overfull(self) -> bool:
        """The peer does not read: more waits for it than it is allowed."""
        return self.outbound_bytes > self.max_outbound

    def flush(self) -> bool:
        """Write what the socket takes now. True if nothing is left. Raises OSError if the peer is gone."""
        if self._broken is not None:
            raise self._broken
        outbound = self._outbound
        while outbound:
            data, fd = outbound.popleft()
            if outbound and fd < 0:
                parts = [data]
                while outbound and outbound[0][1] < 0:
                    parts.append(outbound.popleft()[0])
                data = b"".join(parts)
            try:
                sent = self.sock.send(data) if fd < 0 else self._send_with(data, fd)
            except BlockingIOError:
                outbound.appendleft((data, fd))
                return False
            except OSError:
                # ``close`` still has the descriptor to close.
                outbound.appendleft((data, fd))
                raise
            self.outbound_bytes -= sent
            if fd >= 0:
                # It went out with the first byte; what is left of the frame must not carry it again.
                os.close(fd)
            if sent < len(data):
                outbound.appendleft((data[sent:], -1))
                return False
        return True

    def flush_half(self) -> None:
        """Write what waits, and half of the last frame: the last act of a process that is to die in the middle of a frame."""
        data, fd = self._outbound.pop()
        self._outbound.append((data[: len(data) // 2], fd))
        self.flush()

    def _send_with(self, data: bytes, fd: int) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
        return self.sock.sendmsg([data], ancillary)

    def end_sending(self) -> None:
        """The peer reads what it was sent, and then the end of the stream."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            # It is gone.
            pass

    def close(self) -> None:
        for _, fd in self._outbound:
            if fd >= 0:
                os.close(fd)
        self._outbound.clear()
        self.sock.close()

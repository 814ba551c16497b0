"""The client's and the engine's end of a connection: a ``multiprocessing`` connection to the scheduler."""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shmsched.errors import (
    ProtocolError,
    SchedulerDied,
    SchedulerUnreachable,
    SharedMemoryLimit,
    ShmschedError,
    SystemLimit,
)
from shmsched.limits import is_no_thread, is_shortage, lacking
from shmsched.wire.codec import pack, unpack
from shmsched.wire.credentials import credentials, name_of, refuse_other_users
from shmsched.wire.frames import MAGIC, MAJOR, MINOR, Hello, Role
from shmsched.wire.framing import FrameSplitter, framed
from shmsched.wire.socket_lock import holder_of, is_held
from shmsched.wire.socket_path import check_path_length, default_socket

READ_SIZE = 1 << 16
RETRY_S = 0.02
BACKLOG_S = 5.0
"""How long to keep trying while the daemon's backlog is full."""
# Plain numbers: to combine members of an enum takes 3 us each time.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0x40000000))
_CLOSE_ON_EXEC_AND_NOW = _CLOSE_ON_EXEC | int(socket.MSG_DONTWAIT)
_DONTWAIT, _TRUNCATED = int(socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)
_MAX_DESCRIPTORS = 64
_LOST = -1
_ANCILLARY = socket.CMSG_SPACE(8 * 4)


class Link:
    """Frames to and from the scheduler, over a ``multiprocessing`` connection that it takes over.

    ``send`` may be called from any thread, ``receive`` from one at a time.
    """

    def __init__(self, connection: Connection) -> None:
        # One owner for the descriptor: two would close it twice, the second time perhaps somebody else's.
        with connection:
            self._sock = socket.socket(fileno=os.dup(connection.fileno()))
        self._splitter = FrameSplitter()
        self._send_lock = threading.Lock()
        self._outbound = bytearray()
        self._flusher: threading.Thread | None = None
        self.frames_sent = 0
        """Frames that are on their way, whatever an interrupt did to the ``send`` that took them."""
        self.on_outbound: Callable[[], None] | None = None
        """If set, ``send`` leaves everything to ``flush`` and calls this when there is something to flush."""
        self._descriptors: list[int] = []
        """Those that came, in order, each with a frame of its own; _LOST for one that the kernel had to drop."""
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._closed = False
        self.peer_pid = credentials(self._sock)[0]

    @classmethod
    def connect(cls, path: str | os.PathLike[str], role: Role, wait: float = 0.0) -> Link:
        """Connect and say hello. ``wait``: seconds to keep trying while no daemon answers yet."""
        attempts = cls.attempts(path, role, wait)
        while (link := next(attempts)) is None:
            time.sleep(RETRY_S)
        return link

    @classmethod
    def attempts(cls, path: str | os.PathLike[str], role: Role, wait: float) -> Iterator[Link | None]:
        """``connect`` for those who wait in their own way: None says to try again after RETRY_S."""
        check_path_length(os.fspath(path))
        deadline = time.monotonic() + wait
        backlog_deadline = time.monotonic() + max(wait, BACKLOG_S)
        while True:
            try:
                yield cls._greet(path, role)
            except OSError as e:
                until = {errno.ENOENT: deadline, errno.ECONNREFUSED: deadline, errno.EAGAIN: backlog_deadline}
                if time.monotonic() >= until.get(e.errno or 0, 0.0):
                    raise _unreachable(path, e) from e
                # The daemon is starting, or many connect at once: neither a new socket nor a free place in its backlog
                # announces itself.
                yield None

    @classmethod
    def _greet(cls, path: str | os.PathLike[str], role: Role) -> Link:
        """One attempt: a Unix socket connects at once or not at all."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(os.fspath(path))
            sock.setblocking(True)
            refuse_other_users(credentials(sock)[1])
        except BaseException:
            sock.close()
            raise
        link = cls(Connection(sock.detach()))
        try:
            link.send(Hello(MAGIC, MAJOR, MINOR, role))
        except SchedulerDied:
            # Refused before it was greeted: why, is there to be received.
            pass
        return link

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any) -> None:
        """Send one frame, or leave it to a thread if the scheduler is behind: no caller waits, whatever lock it holds.

        What waits is bounded by what the caller may have outstanding. Raises SchedulerDied if the connection is gone.
        """
        self.send_packed(framed(pack(message)))

    def send_packed(self, data: bytes) -> None:
        """``send`` of a frame that is packed already."""
        with self._send_lock:
            # Counted before: an interrupt that arrives during the system call is raised right after it.
            self.frames_sent += 1
            if self._outbound or self.on_outbound is not None:
                self._outbound += data
                if self.on_outbound is None:
                    self._push()
                elif len(self._outbound) == len(data):
                    self.on_outbound()
                return
            try:
                sent = self._sock.send(data, _DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError as e:
                self.frames_sent -= 1
                raise self._gone(e) from e
            if sent < len(data):
                self._outbound += data[sent:]
                self._push()

    def can_send(self, timeout: float) -> bool:
        """Whether ``send`` can be called here: not by a finalizer that runs in the middle of one, on its very thread."""
        if not self._send_lock.acquire(timeout=timeout):
            return False
        self._send_lock.release()
        return True

    def flush(self) -> bool:
        """Send what waits. True if nothing is left, as far as this side knows.

        Raises SchedulerDied if the connection is gone.
        """
        if not self._outbound:
            return True
        with self._send_lock:
            return self._push()

    def _push(self) -> bool:
        """Send what waits, as far as the scheduler takes it; the rest is the flusher's. The caller holds the lock."""
        if self._flusher is not None:
            return True
        try:
            while self._outbound:
                del self._outbound[: self._sock.send(self._outbound, _DONTWAIT)]
        except BlockingIOError:
            if self.on_outbound is None:
                self._leave_to_flusher()
            return False
        except OSError as e:
            self._outbound.clear()
            raise self._gone(e) from e
        return True

    def _leave_to_flusher(self) -> None:
        self._flusher = threading.Thread(target=self._flush, name="shmsched-sender", daemon=True)
        try:
            self._flusher.start()
        except RuntimeError as e:
            self._flusher = None
            if not is_no_thread(e):
                raise
            # Then the caller waits for the scheduler after all.
            try:
                while self._outbound:
                    del self._outbound[: self._sock.send(self._outbound[:READ_SIZE])]
            except OSError as gone:
                self._outbound.clear()
                raise self._gone(gone) from gone

    def _gone(self, cause: OSError) -> SchedulerDied:
        return SchedulerDied(f"the connection to the scheduler ({name_of(self.peer_pid)}) is gone: {cause}")

    def _flush(self) -> None:
        """Send what waits, at the scheduler's pace, until nothing does."""
        try:
            while True:
                with self._send_lock:
                    data = bytes(self._outbound[:READ_SIZE])
                    if not data:
                        self._flusher = None
                        return
                sent = self._sock.send(data)
                with self._send_lock:
                    del self._outbound[:sent]
        except OSError:
            # The connection is over: whoever receives from it is told, and the next ``send`` finds out by itself.
            with self._send_lock:
                self._outbound.clear()
                self._flusher = None

    def receive(self, timeout: float | None = None) -> list[Any] | None:
        """The frames that have arrived, waiting up to ``timeout`` seconds for the first; None at the end of the stream."""
        if timeout is not None and not self.wait_readable(timeout):
            return []
        return self._receive(_CLOSE_ON_EXEC)

    def receive_for(self, seconds: float) -> None:
        """From now on a ``receive`` without a time-out of its own waits at most so long. May be called by a signal handler."""
        whole, rest = divmod(round(seconds * 1e6), 1_000_000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, rest))

    def wait_readable(self, timeout: float | None = None) -> bool:
        """Wait until something has arrived, or the stream has ended. False after ``timeout`` seconds. One thread at a time."""
        return bool(self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000))

    def receive_ready(self) -> list[Any] | None:
        """The frames that are here, without waiting; None at the end of the stream."""
        return self._receive(_CLOSE_ON_EXEC_AND_NOW)

    def _receive(self, flags: int) -> list[Any] | None:
        try:
            data, ancillary, came, _ = self._sock.recvmsg(READ_SIZE, _ANCILLARY, flags)
        except (InterruptedError, BlockingIOError):
            return []
        except OSError:
            return None
        if ancillary or came & _TRUNCATED:
            self._take_descriptors(ancillary, came)
        if not data:
            return None
        return [unpack(payload) for payload in self._splitter.feed(data)]

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]], came: int) -> None:
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._descriptors.extend(fds)
        if came & _TRUNCATED:
            # A read ends with the frame that carries a descriptor: it is the one of this read that was lost.
            self._descriptors.append(_LOST)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise ProtocolError(f"{len(self._descriptors)} descriptors came that no frame asked for")

    def descriptor(self) -> int:
        """The descriptor that rode on the frame at hand. The caller owns it now.

        Raises ProtocolError if there is none, SharedMemoryLimit if this process may have no further one.
        """
        if not self._descriptors:
            raise ProtocolError("a frame came without the descriptor that belongs to it")
        fd = self._descriptors.pop(0)
        if fd == _LOST:
            why = lacking(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            raise SharedMemoryLimit(f"no descriptor is left for the shared memory that the scheduler sent: {why}")
        return fd

    def shutdown(self) -> None:
        """End the stream both ways: a ``receive`` that waits in another thread returns None."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self._closed:
            return
        self.shutdown()
        flusher = self._flusher
        if flusher is not None:
            flusher.join()
        self.abandon()

    def abandon(self) -> None:
        """Close this process's copy of the connection and leave the other's alone, as a forked child must. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for fd in self._descriptors:
            if fd != _LOST:
                os.close(fd)
        self._descriptors.clear()
        self._sock.close()


def _unreachable(path: str | os.PathLike[str], cause: OSError) -> ShmschedError:
    if cause.errno != errno.EAGAIN and is_shortage(cause):
        return SystemLimit(f"no connection to the daemon at {os.fspath(path)} can be made: {lacking(cause)}")
    if cause.errno == errno.ENOENT and is_held(Path(path)):
        return SchedulerUnreachable(
            f"a daemon has {os.fspath(path)} (pid {holder_of(Path(path))}), but no socket is there now: it is starting, or"
            " puts back what was removed. Try again in a second; if it stays so, that process is stopped, and ends by `kill`"
        )
    if cause.errno == errno.ENOENT and not Path(path).exists():
        return SchedulerUnreachable(
            f"no daemon at {os.fspath(path)}: there is no such socket. `shmsched up` starts one{_there(path)}"
        )
    return SchedulerUnreachable(
        f"no daemon answers at {os.fspath(path)}: {cause}. `shmsched up` starts one{_there(path)}"
    )


def _there(path: str | os.PathLike[str]) -> str:
    return "" if Path(path) == default_socket() else f" there with --socket {os.fspath(path)}"

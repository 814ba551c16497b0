"""The client's and the engine's end of a connection: a ``multiprocessing`` connection to the scheduler."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shmsched import failpoints
from shmsched.errors import SchedulerDied, SchedulerUnreachable, ShmschedError, SocketPathError, SystemLimit
from shmsched.limits import is_no_thread, is_shortage, lacking
from shmsched.locks import OwnedLock
from shmsched.wire.codec import pack
from shmsched.wire.credentials import credentials, name_of, refuse_other_users
from shmsched.wire.frames import MAGIC, MAJOR, MINOR, Hello, Role
from shmsched.wire.framing import framed
from shmsched.wire.inbound import AT_ONCE, WAITING, Inbound
from shmsched.wire.socket_lock import holder_of, is_held
from shmsched.wire.socket_path import check_can_be, check_path, default_socket

RETRY_S = 0.02
BACKLOG_S = 5.0
"""How long to keep trying while the daemon's backlog is full."""
_DONTWAIT_ONCE = (int(socket.MSG_DONTWAIT),)

Outgoing = list[Any]
"""A frame on its way: its bytes, and how many of them each system call took."""


class _Socket(socket.socket):
    """One that an interrupt has lost is closed without a word."""

    __slots__ = ()

    def __del__(self) -> None:
        # Not its own close(): one for which no descriptor was left lacks what that looks at.
        socket.SocketType.close(self)


class Link:
    """Frames to and from the scheduler, over a ``multiprocessing`` connection that it takes over.

    ``send`` may be called from any thread, ``receive`` from one at a time. An interrupt that ends either loses nothing and doubles
    nothing: a frame is sent or not at all, what was half sent is finished by the next ``send`` or ``flush``, and what has arrived is
    there for the next one who asks.
    """

    def __init__(self, connection: Connection | socket.socket) -> None:
        # One owner for the descriptor: two would close it twice, the second time perhaps somebody else's.
        if isinstance(connection, socket.socket):
            self._sock = connection
        else:
            with connection:
                self._sock = _Socket(fileno=os.dup(connection.fileno()))
        self.inbound = Inbound(self._sock)
        self._send_lock = OwnedLock()
        self._outbound: deque[Outgoing] = deque()
        """Frames that are not known to be with the kernel, in order."""
        self._write = self._sock.send
        self._flusher: threading.Thread | None = None
        self.on_outbound: Callable[[], None] | None = None
        """If set, ``send`` leaves everything to ``flush`` and calls this when there is something to flush."""
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
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
        check_path(os.fspath(path))
        deadline = time.monotonic() + wait
        backlog_deadline = time.monotonic() + max(wait, BACKLOG_S)
        while True:
            try:
                yield cls._greet(path, role)
            except OSError as e:
                if e.errno is None:
                    # It is a signal handler's.
                    raise
                until = {errno.ENOENT: deadline, errno.ECONNREFUSED: deadline, errno.EAGAIN: backlog_deadline}
                if time.monotonic() >= until.get(e.errno or 0, 0.0):
                    raise _unreachable(path, e) from e
                # The daemon is starting, or many connect at once: neither a new socket nor a free place in its backlog
                # announces itself.
                yield None

    @classmethod
    def _greet(cls, path: str | os.PathLike[str], role: Role) -> Link:
        """One attempt: a Unix socket connects at once or not at all."""
        sock = _Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(os.fspath(path))
            sock.setblocking(True)
            refuse_other_users(credentials(sock)[1])
            link = cls(sock)
            try:
                hello = Hello(MAGIC, MAJOR, MINOR, role)
                failpoints.hit("hello.half_sent", link.send_half, hello)
                link.send(hello)
                failpoints.hit("hello.sent")
            except SchedulerDied:
                # Refused before it was greeted: why, is there to be received.
                pass
            return link
        except BaseException:
            sock.close()
            raise

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any) -> None:
        """Send one frame, or leave it to a thread if the scheduler is behind: no caller waits, whatever lock it holds.

        What waits is bounded by what the caller may have outstanding. Raises SchedulerDied if the connection is gone.
        """
        self.send_packed(framed(pack(message)))

    def send_packed(self, data: bytes, frame: Outgoing | None = None) -> None:
        """``send`` of a frame that is packed already. ``frame``: ``outgoing(data)``, for one who may come again with it after an
        interrupt, and wants it sent once."""
        if frame is None:
            frame = [data]
        outbound = self._outbound
        try:
            with self._send_lock:
                if len(frame) > 1 or (outbound and outbound[-1] is frame):
                    # It was taken before.
                    self._push()
                    return
                outbound.append(frame)
                if self.on_outbound is not None:
                    self.on_outbound()
                elif outbound[0] is frame:
                    # As in ``_write_some``. No ``try`` of its own: its line, where a tracer may raise, belongs to no handler.
                    frame.extend(map(self._write, (data,), _DONTWAIT_ONCE))
                    if frame[-1] == len(data):
                        outbound.popleft()
                    else:
                        self._push()
                else:
                    self._push()
        except BaseException as e:
            self._send_lock.give_up()
            if isinstance(e, OSError) and e.errno is not None:
                if not isinstance(e, BlockingIOError):
                    raise self._gone(e) from e
                self.flush()
                return
            raise

    def can_send(self, timeout: float) -> bool:
        """Whether ``send`` can be called here: not by a finalizer that runs in the middle of one, on its very thread."""
        return self._send_lock.can_be_had(timeout)

    @property
    def sends_here(self) -> bool:
        """Whether this very thread is in the middle of sending."""
        return self._send_lock.mine

    def flush(self) -> bool:
        """Send what waits. True if nothing is left, as far as this side knows.

        Raises SchedulerDied if the connection is gone.
        """
        if not self._outbound:
            return True
        failpoints.hit("client.flush.half_sent", self._send_half_of_what_waits)
        try:
            with self._send_lock:
                return self._push()
        except BaseException as e:
            self._send_lock.give_up()
            if isinstance(e, OSError) and e.errno is not None:
                raise self._gone(e) from e
            raise

    def send_half(self, message: Any) -> None:
        """What waits, and half of a frame, packed or not: the last act of a process that is to die in the middle of it."""
        self.flush()
        data = message if isinstance(message, bytes) else framed(pack(message))
        self._sock.sendall(data[: len(data) // 2])

    def _send_half_of_what_waits(self) -> None:
        waits = b"".join(frame[0][sum(frame[1:]) :] for frame in self._outbound)
        self._sock.sendall(waits[: len(waits) // 2])

    def _write_some(self, frame: Outgoing, data: bytes) -> None:
        """One system call; the frame notes how much of ``data`` it took. An interrupt comes before both, or after."""
        try:
            frame.extend(map(self._write, (data,), _DONTWAIT_ONCE))
        except BlockingIOError:
            pass

    def _push(self) -> bool:
        """Send what waits, as far as the scheduler takes it; the rest is the flusher's. The caller holds the lock."""
        if self._flusher is not None and self._flusher.is_alive():
            return True
        if self._all_written():
            return True
        if self.on_outbound is None:
            self._leave_to_flusher()
        return False

    def _all_written(self) -> bool:
        outbound = self._outbound
        while outbound:
            frame = outbound[0]
            data, n, calls = frame[0], sum(frame[1:]), len(frame)
            if n == len(data):
                outbound.popleft()
                continue
            self._write_some(frame, data[n:])
            if len(frame) == calls:
                return False
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
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            while not self._all_written():
                poll.poll()

    def _gone(self, cause: OSError) -> SchedulerDied:
        """What it means that a system call has failed: one that has a number. (A signal's handler may raise an OSError as well,
        TimeoutError say.)"""
        self._outbound.clear()
        return SchedulerDied(f"the connection to the scheduler ({name_of(self.peer_pid)}) is gone: {cause}")

    def _flush(self) -> None:
        """Send what waits, at the scheduler's pace, until nothing does."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            try:
                poll.poll()
                with self._send_lock:
                    if self._all_written():
                        self._flusher = None
                        return
            except BaseException as e:
                self._send_lock.give_up()
                if isinstance(e, OSError) and e.errno is not None:
                    # The connection is over: whoever receives from it is told, and the next ``send`` finds out by itself.
                    self._outbound.clear()
                    return
                # Somebody wants this thread to end; the frames are to be sent all the same.

    def receive(self, timeout: float | None = None) -> list[Any] | None:
        """The frames that have arrived, waiting up to ``timeout`` seconds for the first; None at the end of the stream."""
        if timeout is not None and not self.wait_readable(timeout):
            return []
        return self._receive(WAITING)

    def receive_for(self, seconds: float) -> None:
        """From now on a ``receive`` without a time-out of its own waits at most so long. May be called by a signal handler."""
        whole, rest = divmod(round(seconds * 1e6), 1_000_000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, rest))

    def wait_readable(self, timeout: float | None = None) -> bool:
        """Wait until something has arrived, or the stream has ended. False after ``timeout`` seconds. One thread at a time."""
        return self.inbound.waits or bool(self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000))

    def receive_ready(self) -> list[Any] | None:
        """The frames that are here, without waiting; None at the end of the stream."""
        return self._receive(AT_ONCE)

    def _receive(self, flags: tuple[int]) -> list[Any] | None:
        frames = self.inbound.arrived(flags)
        if frames:
            self.inbound.all_handled()
        return frames

    def descriptor(self) -> int:
        """The descriptor that rode on the frame at hand. The caller owns it now. Raises ProtocolError if there is none."""
        return self.inbound.descriptor()

    @property
    def closed(self) -> bool:
        # As the descriptor says it: an interrupt may come right behind the close.
        return self._sock.fileno() < 0

    def shutdown(self) -> None:
        """End the stream both ways: a ``receive`` that waits in another thread returns None."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as e:
            if e.errno is None:
                # It is a signal handler's.
                raise

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self.closed:
            return
        self.shutdown()
        flusher = self._flusher
        if flusher is not None and flusher is not threading.current_thread():
            flusher.join()
        self.abandon()

    def abandon(self) -> None:
        """Close this process's copy of the connection and leave the other's alone, as a forked child must. Idempotent."""
        if not self.closed:
            self.inbound.close_descriptors()
            self._sock.close()


def outgoing(data: bytes) -> Outgoing:
    """A frame to be sent once, however often one comes with it."""
    return [data]


def _unreachable(path: str | os.PathLike[str], cause: OSError) -> ShmschedError:
    if cause.errno != errno.EAGAIN and is_shortage(cause):
        return SystemLimit(f"no connection to the daemon at {os.fspath(path)} can be made: {lacking(cause)}")
    if cause.errno == errno.ENOENT and is_held(Path(path)):
        return SchedulerUnreachable(
            f"a daemon has {os.fspath(path)} (pid {holder_of(Path(path))}), but no socket is there now: it is starting, or"
            " puts back what was removed. Try again in a second; if it stays so, that process is stopped, and ends by `kill`"
        )
    try:
        check_can_be(Path(path))
    except SocketPathError as e:
        return e
    if cause.errno == errno.EACCES:
        return SocketPathError(f"{os.fspath(path)} is not to be reached: {cause.strerror}. Choose a path that is yours")
    if cause.errno == errno.ENOENT:
        return SchedulerUnreachable(
            f"no daemon at {os.fspath(path)}: there is no such socket. `shmsched up` starts one{_there(path)}"
        )
    return SchedulerUnreachable(
        f"no daemon answers at {os.fspath(path)}: {cause}. `shmsched up` starts one{_there(path)}"
    )


def _there(path: str | os.PathLike[str]) -> str:
    return "" if Path(path) == default_socket() else f" there with --socket {os.fspath(path)}"
